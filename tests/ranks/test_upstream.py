"""Faults of the stack that the package works around: a test fails when upstream has mended one. Then delete ours."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig, TPLayerSpec
from deepspeed.module_inject.layers import LinearLayer
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import BatchSampler, DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from trl.trainer.sft_trainer import SFTTrainer

from indictune.distributed import sharding
from tests.conftest import FinishedRun
from tests.faults.runs import STEP, Job
from tests.launch_environment import launched
from tests.models.tiny import SMALL
from tests.ranks import mutants
from tests.ranks.launching import Run, accelerate, python, start, train

Start = Callable[..., Run]


def test_safetensors_lets_nobody_else_read_what_it_writes(tmp_path: Path) -> None:
    """safetensors 0.8, whatever the umask; see `atomic_folder.match_config_mode`."""
    (tmp_path / "a.json").touch()
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a.json").stat().st_mode & 0o777 != 0o600


def test_a_copy_of_a_tied_weight_is_saved_beside_it() -> None:
    """transformers 5.23; see `sharding.without_tied_copies`."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    gathered = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = gathered.keys() - {"lm_head.weight"}
    assert remove_tied_weights_from_state_dict(model.state_dict(), model).keys() == names
    assert remove_tied_weights_from_state_dict(gathered, model).keys() == gathered.keys()
    assert set(sharding.without_tied_copies(model, gathered) or ()) == names
    gathered["lm_head.weight"] += 1
    assert set(sharding.without_tied_copies(model, gathered) or ()) == gathered.keys()


@pytest.mark.slow
def test_zero3_saves_layer_norms_by_their_old_names(job: Path, tmp_path: Path, run_under: Start) -> None:
    """transformers 5.23; see `sharding._forget_unused_renamings`."""
    flags = ("--config", str(job), "--max_steps", "1")
    stock = train(
        accelerate("zero3", 2), tmp_path, *flags, script=mutants.__file__, MUTANT=mutants.without_mended_names.__name__
    )
    assert any(name.endswith("LayerNorm.gamma") for name in stock.weights)
    assert not any(name.endswith("LayerNorm.gamma") for name in run_under("zero3", 2).weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "message"),
    [
        (mutants.without_borrowed_type, "[another-strategy-came-up]"),
        (mutants.without_chosen_blocks, "Error"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fsdp2_does_not_run_without_the_workaround(
    job: Path, tmp_path: Path, without: Callable[[], None], message: str
) -> None:
    """accelerate 1.15; see `process_group.start_on_gloo` and `fsdp.repeated_blocks`."""
    command = [*accelerate("fsdp2", 2), mutants.__file__, "--config", str(job), "--output_dir", str(tmp_path)]
    result = start(command, {"MUTANT": without.__name__})
    assert result.returncode != 0
    assert message in (tmp_path / "status.json").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "scatters"), [("zero2", False), ("zero3", True)])
def test_which_of_zero_scatters_its_sums(job: Path, tmp_path: Path, strategy: str, scatters: bool) -> None:
    """DeepSpeed 0.19.8; see `benchmarks.communication`: a GPU sends half as much where sums are scattered."""
    command = [*accelerate(strategy, 2), mutants.__file__, "--config", str(job), "--max_steps", "2"]
    notes = tmp_path / "notes"
    variables = {"MUTANT": mutants.noted_sums.__name__, "NOTES": str(notes)}
    assert start([*command, "--output_dir", str(tmp_path / "out")], variables).returncode == 0
    summed = dict.fromkeys(("all_reduce", "reduce_scatter_fn"), 0)
    for line in notes.read_text(encoding="ascii").splitlines():
        name, numbers = line.split()
        summed[name] += int(numbers)
    assert (summed["reduce_scatter_fn"] > 100_000) == scatters
    assert (summed["all_reduce"] > 100_000) != scatters


@pytest.mark.slow
def test_zero3_leaves_parameters_on_their_way(finished_run: FinishedRun, tmp_path: Path) -> None:
    """DeepSpeed 0.19.8; see `sharding.full_norms`."""
    job = Job(finished_run.recipe, tmp_path / "out", tuple(accelerate("zero3", 2)))
    job.start(f"SIGTERM@{STEP}:3")
    assert job.status["state"] == "resumable"
    result = job.start(script="tests/ranks/mutants.py", MUTANT=mutants.without_released_parameters.__name__)
    assert result.returncode != 0
    assert "Cannot partition a param in flight" in result.stderr


def test_accelerate_shards_no_model_without_an_optimizer() -> None:
    """accelerate 1.15; see `sharding.prepare_for_evaluation`."""
    assert "a model and optimizer must be passed together" in inspect.getsource(Accelerator.prepare)


def test_weights_that_a_checkpoint_lacks_are_without_data_on_all_ranks_but_one() -> None:
    """transformers 5.23; see `sharding._hidden_from_transformers`."""
    source = inspect.getsource(PreTrainedModel._move_missing_keys_from_meta_to_device)
    assert "is_fsdp_enabled() and not is_local_dist_rank_0()" in source


@pytest.mark.parametrize("kind", ["MULTI_GPU", "FSDP", "MEGATRON_LM"])
def test_accelerate_hands_stages_over_as_those_of_megatron_alone(tmp_path: Path, kind: str) -> None:
    """accelerate 1.15; see the top of `accelerate_configs/pipeline.yaml`."""
    file = tmp_path / "stages.yaml"
    asked = {"parallelism_config": {"parallelism_config_pp_size": 4}, "fsdp_config": {"fsdp_version": 2}}
    asked["megatron_lm_config"] = {"megatron_lm_pp_degree": 4, "megatron_lm_tp_degree": 1}
    file.write_text(json.dumps({"distributed_type": kind, "mixed_precision": "no"} | asked), encoding="utf-8")
    stages = {name: value for name, value in launched(file, 4).items() if "PP_" in name or "PIPELINE" in name}
    megatron = {"MEGATRON_LM_PP_DEGREE": "4"} if kind == "MEGATRON_LM" else {}
    assert stages == megatron, f"{kind} hands over stages: ask by it in pipeline.yaml, 3d.yaml and axes.py"
    file.write_text(json.dumps({"distributed_type": kind, "pipeline_stages": 4}), encoding="utf-8")
    with pytest.raises(ValueError, match="unknown keys"):
        launched(file, 4)


@pytest.mark.more
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp16_on_a_cpu_is_fp32_without_a_word() -> None:
    """accelerate 1.15; see `check.check_fp16`."""
    program = "from accelerate import Accelerator; a = Accelerator(cpu=True, mixed_precision='fp16')"
    done = start([*python(), "-c", f"{program}; print(a.mixed_precision, a.native_amp, a.scaler)"])
    assert (done.returncode, done.stdout) == (0, "fp16 False None\n")


def test_trl_casts_the_adapter_of_a_quantised_base_to_bf16() -> None:
    """trl 1.16; see `chat_trainer._keep_trained_weights_in_fp32`."""
    assert "param.data = param.data.to(torch.bfloat16)" in inspect.getsource(SFTTrainer.__init__)


def test_an_adapters_activations_under_zero3_are_computed_again_as_any(tmp_path: Path) -> None:
    """trl 1.16 asks for reentrance there, by a name that transformers 5.23 no longer reads by then.

    Where it is heard, see that `test_llama.py` still passes under ZeRO-3.
    """
    asked = 'args.gradient_checkpointing_kwargs["use_reentrant"] = True'
    assert asked in inspect.getsource(SFTTrainer.__init__)
    same: dict[str, Any] = {"use_cpu": True, "report_to": "none", "max_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), gradient_checkpointing=True, **same)
    args.gradient_checkpointing_kwargs = {"use_reentrant": True}
    sizes: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1))
    rows: Any = [{"input_ids": [1, 2], "labels": [1, 2]}]
    Trainer(model, args, train_dataset=rows).train()
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_deepspeed_gives_its_groups_no_timeout() -> None:
    """DeepSpeed 0.19.8; see `upstream.set_default_timeout`."""
    assert "return torch.distributed.new_group(ranks)\n" in inspect.getsource(TorchBackend.new_group)


class Line(nn.Module):
    """Of one weight. Its first loss is NaN, and its gradient never."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.first = torch.nan

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss, self.first = self.weight * x.mean() + self.first, 0.0
        return {"loss": loss}


class EpochRecorder(BatchSampler):
    """Records the epochs that `set_epoch` gets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class StockTrainer(Trainer):
    """Of four rows in batches of one, by a batch sampler of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        same: dict[str, Any] = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "save_steps": 2}
        rows: Any = [{"x": float(number)} for number in range(4)]
        self.line = Line()
        super().__init__(model=self.line, args=TrainingArguments(**same, **settings), train_dataset=rows)
        self.recorder = EpochRecorder(range(len(rows)), 1, False)

    def get_train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_sampler=self.recorder)  # type: ignore[arg-type]

    @property
    def logged(self) -> dict[float, float]:
        """The losses by their steps."""
        return {entry["step"]: entry["loss"] for entry in self.state.log_history if "loss" in entry}


@pytest.mark.more
def test_a_batch_sampler_gets_only_the_epoch_of_a_resume(tmp_path: Path) -> None:
    """transformers 5.23 and accelerate 1.15; see `EpochShuffle`."""
    trainer = StockTrainer(tmp_path, num_train_epochs=3)
    trainer.train()
    assert trainer.recorder.epochs == []
    again = StockTrainer(tmp_path, num_train_epochs=3)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert again.recorder.epochs == [1]


def test_a_loss_that_is_nan_is_logged_for_ever(tmp_path: Path) -> None:
    """transformers 5.23; see `KeepRecords`."""
    trainer = StockTrainer(tmp_path, max_steps=3, logging_steps=1, logging_nan_inf_filter=False)
    trainer.train()
    assert [math.isnan(loss) for loss in trainer.logged.values()] == [True, True, True]
    assert math.isfinite(trainer.line.weight.item())


@pytest.mark.more
def test_a_run_goes_on_logging_as_seldom_as_before(tmp_path: Path) -> None:
    """transformers 5.23; see `RestoreProgress.on_train_begin`."""
    StockTrainer(tmp_path, max_steps=2, logging_steps=3).train()
    again = StockTrainer(tmp_path, max_steps=6, logging_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert list(again.logged) == [3, 6]


def test_the_last_checkpoint_is_deleted_before_the_model_is_saved() -> None:
    """transformers 5.23; see `LoadBest`."""
    source = inspect.getsource(Trainer._finalize_training)
    assert source.index("_load_best_model()") < source.index("shutil.rmtree(checkpoint") < source.index("on_train_end")


@pytest.mark.slow
def test_the_best_checkpoint_is_known_under_fsdp2(job: Path, tmp_path: Path) -> None:
    best = ("--eval_strategy", "steps", "--eval_steps", "2", "--save_steps", "2", "--load_best_model_at_end", "true")
    run = train(accelerate("fsdp2", 2), tmp_path, "--config", str(job), *best, "--max_steps", "4")
    state = (run.folder / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8")
    assert '"best_model_checkpoint": "' in state
    assert run.metrics["eval"]["num_examples"] == 53


def test_autotp_does_not_look_into_a_layer_with_an_adapter() -> None:
    """DeepSpeed 0.19.8; see `tensor_plans.check_split`."""
    small: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**small, intermediate_size=8)), LoraConfig(r=2))
    spec = TPLayerSpec([r".*\.q_proj\.base_layer\.weight$", r".*\.k_proj\.weight$"])
    plan = AutoTPConfig(layer_specs=[spec], use_default_specs=False)
    autotp = AutoTP(model, (), "", None, (nn.Linear, nn.Embedding), None, partition_config=plan, training_mode=True)
    autotp.set_tensor_parallel_config(1, None)
    autotp.update_linear_policies()
    autotp._replace_module(model)
    split = [name for name, each in model.named_modules() if isinstance(each, LinearLayer)]
    assert [name.rpartition("self_attn.")[2] for name in split] == ["k_proj"]
