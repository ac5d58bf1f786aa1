"""A model with code of its own stays one, in checkpoints and at the end, under every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from indictune.checkpoint.store import UNFINISHED_MODEL
from indictune.cli import main
from tests.conftest import FinishedRun
from tests.ranks import mutants
from tests.ranks.launching import Run, accelerate, start

Start = Callable[..., Run]

CODE = """
from transformers import BertForSequenceClassification

from .scaling import SCALE


class AbacusForSequenceClassification(BertForSequenceClassification):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * SCALE
        return output
"""
FILES = {"modeling_abacus.py": CODE, "scaling.py": "SCALE = 2.0\n"}
AUTO_MAP = {"AutoModelForSequenceClassification": "modeling_abacus.AbacusForSequenceClassification"}


@pytest.fixture(scope="module")
def abacus(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose class comes from its folder."""
    folder = tmp_path_factory.mktemp("abacus")
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((finished_run.folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"auto_map": AUTO_MAP, "architectures": ["AbacusForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "ddp", "zero1", "zero3")]
)
def test_its_folders_have_its_code(run_under: Start, abacus: Path, tmp_path: Path, strategy: str) -> None:
    flags = ("--model_name_or_path", str(abacus), "--trust_remote_code", "true", "--max_steps", "2")
    run = run_under(strategy, 2, *flags)
    log = (run.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert "Padding rows, grouped by length: the model has its own code" in log
    command = ["checkpoint", str(run.folder / "checkpoint-2"), "--convert_to", str(tmp_path / "model")]
    assert main([*command, "--trust_remote_code", "true"]) == 0
    for folder in (run.folder, run.folder / "checkpoint-2", tmp_path / "model"):
        code = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
        if folder.name == "checkpoint-2":
            code = {name: text for name, text in code.items() if not name.startswith("zero_to_")}  # DeepSpeed's
        assert code == FILES
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert (config["auto_map"], config["architectures"]) == (AUTO_MAP, ["AbacusForSequenceClassification"])
    for folder in (run.folder, tmp_path / "model"):
        model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__name__ == "AbacusForSequenceClassification"
        assert all(torch.equal(model.state_dict()[name], weight) for name, weight in run.weights.items())


@pytest.mark.slow
def test_fsdp2_hides_its_code(job: Path, abacus: Path, tmp_path: Path) -> None:
    """transformers 5.23; see `sharding.save_code`."""
    flags = ("--model_name_or_path", str(abacus), "--trust_remote_code", "true", "--max_steps", "1")
    command = [*accelerate("fsdp2", 2), mutants.__file__, "--config", str(job), "--output_dir", str(tmp_path), *flags]
    assert start(command, {"MUTANT": mutants.without_its_code.__name__}).returncode != 0
    refused = tmp_path / UNFINISHED_MODEL  # it cannot be read again
    assert (refused / "model.safetensors").is_file()
    saved = {path.name for path in refused.glob("*.py")}
    assert "_fsdp_api.py" in saved  # of torch
    assert not saved & FILES.keys()
