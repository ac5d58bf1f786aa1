"""The trainers override few methods of transformers' Trainer, and what they rely on there holds.

Private names of other libraries stand in files named `upstream.py` alone, and each of them still exists.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import sacrebleu.metrics.base
import sacrebleu.metrics.chrf
import torch
import transformers.core_model_loading
import transformers.dynamic_module_utils
from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.state import PartialState
from datasets import Dataset
from huggingface_hub.utils import _http
from optuna.trial import FrozenTrial
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state, _fully_shard
from transformers import PreTrainedConfig, Trainer, trainer_optimizer, training_args
from transformers.integrations import deepspeed
from trl.trainer.sft_trainer import SFTTrainer

from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.exact_trainer import ExactTrainer, IndicTrainer
from indictune.training.task_trainer import TaskTrainer
from tests.ranks.launching import ROOT

# Parameters upstream, without `self`, of each method that is overridden.
OVERRIDDEN = {
    "get_tp_size": [],
    "get_train_dataloader": [],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "save_model": ["output_dir", "_internal_call"],
    "init_hf_repo": ["token", "private"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_save_checkpoint": ["model", "trial"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
}

# In the order in which they stand upstream: what an override, or a callback in place of one, relies on.
ORDER = {
    "_inner_training_loop": ["_init_training_state(", "_prepare_for_training(", "on_train_begin(", "on_epoch_begin("],
    "_run_epoch": [
        "self._load_rng_state(",
        "iter(train_dataloader)",
        "self.get_batch_samples(",
        "on_step_begin(",
        "self.training_step(",
        "self._get_grad_norm(",
        "self.optimizer.step()",
        "on_step_end(",
        "self._maybe_log_save_evaluate(",
    ],
    "_maybe_log_save_evaluate": [
        "tr_loss -= tr_loss",
        "self.log(logs",
        "self._evaluate(",
        "self._determine_best_metric(",
        "self._save_checkpoint(",
    ],
    "_prepare_for_training": ["self.create_scheduler(", "if resume_from_checkpoint is not None", "self._load_scaler("],
    "_finalize_training": ["self.state.best_model_checkpoint is not None", "self._load_best_model()", "on_train_end("],
}


def overridden() -> list[tuple[type, str]]:
    classes = (TaskTrainer, ExactTrainer, IndicTrainer, LlamaTrainer)
    return [
        (each, name)
        for each in classes
        for name in vars(each)
        if not name.startswith("__") and callable(getattr(Trainer, name, None))
    ]


def test_few_methods_are_overridden_each_with_its_reason() -> None:
    found = overridden()
    assert {name for _, name in found} == set(OVERRIDDEN)
    assert len(found) <= 12
    assert len([name for _, name in found if name.startswith("_")]) <= 4
    assert [name for each, name in found if not inspect.getdoc(vars(each)[name])] == []


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_upstream_has_the_parameters_that_an_override_takes(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters)[1:] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", ORDER)
def test_upstream_calls_in_the_order_that_is_relied_on(name: str) -> None:
    source = inspect.getsource(getattr(Trainer, name))
    places = [source.index(part) for part in ORDER[name]]
    assert places == sorted(places)


# Private name -> what of the module upstream that has it, what that module says, and what to do when it goes.
_RESUMED = "A resumed run begins its log and its mean loss with the checkpoint's sums: give `carry_loss` and "
_RESUMED += "`unlogged_loss_of` the new names, and run tests/ranks/test_resume.py."
_OF_TRL = "Give the functions of indictune/upstream.py the new name, and run tests/training/test_chat_trainer.py."
_OF_FSDP = "The plan's memory is compared with `whole_gradients`: find the name, and run tests/distributed/planning."
PRIVATE_NAMES: dict[str, tuple[object, str, str]] = {
    "_tr_loss": (Trainer, "self._tr_loss += tr_loss_step", _RESUMED),
    "_total_loss_scalar": (Trainer, "train_loss = self._total_loss_scalar / ", _RESUMED),
    "_globalstep_last_logged": (Trainer, "(self.state.global_step - self._globalstep_last_logged)", _RESUMED),
    "_evaluate": (
        *(Trainer, "self._evaluate(trial, ignore_keys_for_eval)"),
        "Evaluate in `evaluate_as_in_training` as `_maybe_log_save_evaluate` does now.",
    ),
    "_determine_best_metric": (
        *(Trainer, "def _determine_best_metric(self, metrics"),
        "Compare with the best in `evaluate_as_in_training` as `_maybe_log_save_evaluate` does now.",
    ),
    "_finalize_training": (
        *(Trainer, "def _finalize_training(self, trial, num_train_samples, start_time)"),
        "A resume of a finished run ends by it: end it in `end_training` as `_inner_training_loop` does now.",
    ),
    "_models": (
        *(Accelerator, "self._models.append(model)"),
        "An evaluation without a training prepares its model by it: keep in `evaluation.prepared` what was prepared.",
    ),
    "_scale": (
        *(torch.amp.GradScaler, "self._scale: torch.Tensor | None = None"),
        "`loss_scale` reads it without a wait: find the new name, or call `get_scale` and measure a step on a GPU.",
    ),
    "_metrics": (SFTTrainer, 'self._metrics = {"train": defaultdict(list)', _OF_TRL),
    "_total_train_tokens": (SFTTrainer, "self._total_train_tokens += num_tokens_in_batch // self._tp_size", _OF_TRL),
    "_tp_size": (SFTTrainer, "self._total_train_tokens += num_tokens_in_batch // self._tp_size", _OF_TRL),
    "default_pg_timeout": (
        *(distributed_c10d, "return default_pg_timeout"),
        "ZeRO's groups would wait for 30 minutes: see what `_get_default_timeout` returns now.",
    ),
    "default_pg_nccl_timeout": (
        *(distributed_c10d, "return default_pg_nccl_timeout"),
        "ZeRO's groups would wait for 10 minutes: see what `_get_default_timeout` returns now.",
    ),
    "_shared_state": (
        *(PartialState, "_shared_state = SharedDict()"),
        "FSDP2 on a CPU comes up by it: see in `AcceleratorState.__init__` how FSDP is enabled now.",
    ),
    "_validate_launch_command": (
        *(launch, "args, defaults, mp_from_config_flag = _validate_launch_command(args)"),
        "The sizes of a run are known before its processes by it: read the file in `launch_values` as "
        "`launch_command` does now.",
    ),
    "_n_gpu": (
        *(training_args.TrainingArguments, "return self._n_gpu"),
        "One process would use all GPUs by DataParallel: keep it from them in `use_first_gpu`.",
    ),
    "_save": (
        *(Trainer, "def _save(self, output_dir: str | None = None, state_dict"),
        "FSDP2 and pipelines save a model by it: write gathered weights in `save_whole` as `save_model` does now.",
    ),
    "_BITSANDBYTES_OPTIMIZERS": (
        *(trainer_optimizer, "_BITSANDBYTES_OPTIMIZERS = ["),
        "FSDP2 refuses these optimizers: list in `bitsandbytes_optimizers` the values of `OptimizerNames` they serve.",
    ),
    "_hf_deepspeed_config_weak_ref": (
        *(deepspeed, "_hf_deepspeed_config_weak_ref = weakref.ref(hf_deepspeed_config_obj)"),
        "A model that must be whole is made without ZeRO-3, which is put back then: keep the configuration in "
        "`current_deepspeed_config` as `set_hf_deepspeed_config` does now.",
    ),
    "_auto_class": (
        *(transformers.dynamic_module_utils, "auto_map[obj._auto_class] = full_name"),
        "FSDP2 saves a model's own code by it: see in `custom_object_save` how a class is named now.",
    ),
    "_get_fsdp_state": (_fully_shard, "def _get_fsdp_state(self)", _OF_FSDP),
    "_state_ctx": (_fsdp_state, "self._state_ctx = FSDPStateContext()", _OF_FSDP),
    "_fsdp_param_groups": (_fsdp_state, "self._fsdp_param_groups: list[FSDPParamGroup]", _OF_FSDP),
    "_unsharded_param": (_fsdp_param, "self._unsharded_param = nn.Parameter(", _OF_FSDP),
    "_attn_implementation": (
        *(PreTrainedConfig, "def _attn_implementation(self)"),
        "Only models with some attentions read unpadded batches: find in `attention_of` the one that was chosen.",
    ),
    "_weight_conversions": (
        *(transformers.core_model_loading, 'getattr(model, "_weight_conversions", None)'),
        "Merged and ZeRO-3 models are saved under names without it: see in `revert_weight_conversion` what is undone.",
    ),
    "_commit_hash": (
        *(PreTrainedConfig, '"_commit_hash"'),
        "A resume compares the commits of a model by it: find in `commit_of` the one that was read.",
    ),
    "_validate_args": (
        *(training_args.TrainingArguments, "def _validate_args(self"),
        "Contradicting flags are refused before the rows are prepared by it: see what `__post_init__` checks now.",
    ),
    "_convert_str_dict": (
        *(training_args, "def _convert_str_dict(passed_value: dict)"),
        "`--lr_scheduler_kwargs` is tried as the Trainer reads it: read numbers in `numbers_in` as it does now.",
    ),
    "_trial_id": (FrozenTrial, "self._trial_id = trial_id", "Find how a storage knows a trial."),
    "_fingerprint": (
        *(Dataset, "self._fingerprint"),
        "Prepared rows are kept under it: find in `digest_of_split` what changes with the content of a split.",
    ),
    "_http": (
        *(_http, "def default_client_factory() -> "),
        "An upload's client gives up on a silent Hub: make in `hub_client` a client as huggingface_hub does now.",
    ),
    "_extract_corpus_statistics": (
        *(sacrebleu.metrics.base, "def _extract_corpus_statistics("),
        "Intervals of chrF count the n-grams of each answer: find in `chrf_counts` who counts them now.",
    ),
    "_compute_f_score": (
        *(sacrebleu.metrics.chrf, "def _compute_f_score(self, statistics"),
        "Intervals of chrF are those of summed counts: find in `chrf_of` who makes a score of them now.",
    ),
}
# Operations of torch, which are written in C++ -> what to do when one goes.
OPERATIONS = {
    "_foreach_div_": "Divide in a loop, in `divide_and_copy`.",
    "_foreach_copy_": "Copy in a loop, in `divide_and_copy`.",
    "aten._flash_attention_forward": "Find in `flash_attention` what `torch.nn.attention.varlen` calls now.",
    "mkldnn._reorder_linear_weight": "Let `packed_weights.can_pack` say no: prediction does without packed weights.",
    "mkldnn._linear_pointwise": "Let `packed_weights.can_pack` say no: prediction does without packed weights.",
}
# Public in the standard library, in spite of their names.
STANDARD = {"_actions", "_option_string_actions", "_asdict", "_fields", "_replace", "_exit", "_current_frames"}
PRIVATE = re.compile(r"_[a-zA-Z]\w*")


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_upstream_still_has_a_private_name_that_is_used(name: str) -> None:
    owner, text, advice = PRIVATE_NAMES[name]
    file = Path(inspect.getsourcefile(owner) or "")  # type: ignore[arg-type]
    assert text in file.read_text(encoding="utf-8"), f"`{text}` is no longer in {file}. {advice}"


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_still_has_an_operation_that_is_used(name: str) -> None:
    found: object = torch if "." not in name else torch.ops
    for part in name.split("."):
        assert hasattr(found, part), f"torch has no {name} any more. {OPERATIONS[name]}"
        found = getattr(found, part)


def test_private_names_of_other_libraries_stand_in_files_named_upstream_alone() -> None:
    trees = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "indictune").rglob("*.py"))
        if "shipped" not in path.parts
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    in_upstream: set[str] = set()
    for path, tree in trees.items():
        if path.name == "upstream.py":
            in_upstream |= {*_private(tree)}
            continue
        foreign = {*_private(tree)} - own - STANDARD
        assert foreign == set(), f"{path.relative_to(ROOT)}: give them functions in the upstream.py of its package."
    tested = {*PRIVATE_NAMES, *(name.rpartition(".")[2] for name in OPERATIONS)}
    assert in_upstream | {"default_pg_timeout", "default_pg_nccl_timeout"} == tested


def test_foreign_private_names_are_found() -> None:
    program = """
from a._b import c
from a import _d
class E:
    def _f(self): self._g = x._h; self._f(); y._i += 1; setattr(z, "_j", 0); vars(z).get("_k"); vars(z)["_l"]
"""
    tree = ast.parse(program)
    assert {*_private(tree)} - {*_defined(tree)} == {"_b", "_d", "_h", "_i", "_j", "_k", "_l"}


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives to functions, classes, variables and attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _private(tree: ast.Module) -> Iterator[str]:
    """Private names that a module reads, writes or imports: as attributes, and as strings that name one."""
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and "vars" in ast.unparse(node.func):
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            names = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            names = [each.value for each in [node.slice] if isinstance(each, ast.Constant)]
        yield from (name for name in names if isinstance(name, str) and PRIVATE.fullmatch(name))
