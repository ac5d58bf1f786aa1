"""Without the extra `train`, models are used and classifiers trained; what needs it is refused by name."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaConfig, LlamaForCausalLM, PreTrainedModel
from trl.data_utils import pack_dataset
from trl.trainer.utils import add_fused_lm_head

from indictune.cli import main
from indictune.config.plan import Launch
from indictune.distributed.choose_launcher import choose_launcher
from indictune.errors import Problem, UserError
from indictune.preflight.checks import check_packages, preflight_of_evaluation
from indictune.preflight.values import check_optimizer
from indictune.tasks.chat import Chat, score_labels
from indictune.tasks.classification import Classification
from tests.data.packs import pack
from tests.plans import plan_of
from tests.ranks.launching import ROOT
from tests.test_structure import FILES, imported_with, module_name
from tests.training.tiny import tiny_llama

OF_TRAIN = ("trl", "deepspeed", "bitsandbytes")
OF_CHAT = ("task chat needs", "--method qlora needs", "--optim adamw_8bit needs", "--metric_for_best_model x:")
CURE = "pip install 'indictune[train]'"


@pytest.fixture
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_TRAIN:
        monkeypatch.setitem(sys.modules, name, None)


def named(found: list[Problem]) -> list[tuple[str, Any, str]]:
    assert {each.code for each in found} <= {"extra-missing"}
    assert all(each.cure.endswith(CURE) for each in found)
    return [(each.flag, each.value, each.details["packages"]) for each in found]


@pytest.mark.usefixtures("_light")
class TestRefused:
    def test_all_at_once_before_a_row_is_read(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        words = ["--metric_for_best_model", "x", "--method", "qlora", "--optim", "adamw_8bit", "--dry_run"]
        assert main(["train", "llama", "--output_dir", str(tmp_path / "out"), *words]) == 2
        said = capsys.readouterr().err
        for start in OF_CHAT:
            assert f". {start}" in said
        assert said.count(CURE) == 3

    @pytest.mark.parametrize(
        ("launch", "expected"),
        [
            (Launch("zero2", 2, deepspeed={}, deepspeed_source="my.json"), [("--deepspeed", "my.json", "deepspeed")]),
            (Launch("zero3", 2, deepspeed={}), [("--deepspeed", "zero3", "deepspeed")]),
            (Launch("fsdp2", 2), []),
        ],
    )
    def test_deepspeed_under_a_launcher(self, launch: Launch, expected: list[tuple[str, str, str]]) -> None:
        assert named(check_packages(plan_of(launch=launch), Classification())) == expected

    def test_a_strategy_before_accelerate_starts(self) -> None:
        assert choose_launcher("ddp", 2).command(Path("s.py"), [])[-1] == "s.py"
        with pytest.raises(UserError) as error:
            choose_launcher("zero2", 2).command(Path("s.py"), [])
        assert named(error.value.problems) == [("--strategy", "zero2", "deepspeed")]

    def test_optimizers_of_bitsandbytes(self) -> None:
        assert named(check_optimizer(plan_of({"optim": "lion_8bit"}))) == [("--optim", "lion_8bit", "bitsandbytes")]
        assert check_optimizer(plan_of({"optim": "adamw_torch"})) == []

    def test_weights_in_4_bit(self) -> None:
        config: Any = GemmaConfig()
        config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        plan = replace(plan_of(model={"model_name_or_path": "m"}), model_config=config)
        for trains, flag in ((True, "--model_name_or_path"), (False, "--model")):
            assert named(check_packages(plan, Classification(), trains)) == [(flag, "m", "bitsandbytes")]

    def test_ranks_that_share_the_evaluation_of_a_chat_model(self) -> None:
        assert named(preflight_of_evaluation(plan_of(), Chat())) == []
        plan = plan_of(launch=Launch("ddp", 2, 2))
        assert named(preflight_of_evaluation(plan, Chat())) == [("task", "chat", "trl")]


def small_gemma() -> PreTrainedModel:
    """Its forward caps the logits after the head."""
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, final_logit_softcapping=0.1))


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_labels_are_scored_as_by_trl(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indictune.tasks.chat._SCORED_AT_ONCE", 7)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM.from_pretrained(tiny_llama(tmp_path)) if kind == "llama" else small_gemma()
    ids = torch.randint(3, 64, (3, 12))
    labels = torch.where(torch.rand(3, 12) < 0.7, ids, -100)
    labels[2] = -100  # a row that only fills up a batch
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = []
    with torch.no_grad():
        logits = model(**inputs).logits
        ways: list[Any] = [partial(add_fused_lm_head, outputs=("log_probs", "is_top1")), score_labels]
        for give in ways:
            own = model.forward
            give(model)
            found.append(model(**inputs, labels=labels, fused_lm_head=True))
            torch.testing.assert_close(model(**inputs).logits, logits)
            model.forward = own
    theirs, ours = found
    assert ours.label_mask.sum() > 7  # more than one piece
    assert ours.log_probs.abs().sum() > 1
    torch.testing.assert_close(ours.log_probs, theirs.log_probs)
    assert torch.equal(ours.label_mask, theirs.label_mask)
    assert torch.equal(ours.is_top1, theirs.is_top1.bool())


def test_packs_are_those_of_trl() -> None:
    lengths = np.random.default_rng(0).integers(1, 33, size=500)
    rows = [[row] * length for row, length in enumerate(lengths.tolist())]
    ours = pack(Dataset.from_dict({"input_ids": rows, "labels": rows, "rows": [[row] for row in range(500)]}), 32)
    theirs = pack_dataset(Dataset(pa.table({"input_ids": rows})), 32, map_kwargs={"batch_size": 500})
    assert ours["input_ids"][:] == theirs["input_ids"][:]
    assert ours["seq_lengths"][:] == theirs["seq_lengths"][:]


def statically_imported(module: str) -> Iterator[str]:
    files, left, found = {module_name(path): path for path in FILES}, {module}, set[str]()
    while left:
        found |= left
        left = {name for each in left & files.keys() for name in imported_with(files[each])} - found
    yield from found


@pytest.mark.parametrize("module", ["commands.predict", "serving.app", "commands.evaluate_file", "training.run_task"])
def test_no_file_of_a_verb_imports_what_a_light_install_lacks(module: str) -> None:
    found = set(statically_imported(f"indictune.{module}"))
    assert len(found) > 50
    assert {name.partition(".")[0] for name in found} & set(OF_TRAIN) == set()


@pytest.mark.more
def test_a_classifier_is_trained_and_used(tmp_path: Path) -> None:
    prelude = f"import sys; sys.modules.update(dict.fromkeys({OF_TRAIN}))\n"
    out = str(tmp_path / "out")
    train = ["--config", "recipes/sentiment/demo.yaml", "--output_dir", out, "--max_steps", "2", "--report", "false"]
    script = "import runpy; sys.argv[0] = 'scripts/train_sentiment.py'; runpy.run_path(sys.argv[0], None, '__main__')"
    predict = "from indictune.cli import main; sys.exit(main(sys.argv[1:]))"
    for code, words in ((script, train), (predict, ["predict", out, "--text", "अच्छा"])):
        command = [sys.executable, "-c", prelude + code, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stderr}"
    assert '"label": ' in done.stdout
