"""All checks of a plan together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, Phi3Config, PreTrainedConfig

from indictune.checkpoint import store
from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_recipe
from indictune.errors import Problem
from indictune.preflight.checks import preflight
from indictune.preflight.values import make_plan
from indictune.tasks.classification import Classification
from tests.checkpoint.test_store import manifest, write
from tests.plans import codes

TWO_RANKS: dict[str, Any] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture(autouse=True)
def _no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    monkeypatch.chdir(tmp_path)


class Of(Classification):
    """Of a model with a given configuration."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return self.config


def found(*argv: str, of: PreTrainedConfig | None = None, **environ: Any) -> list[Problem]:
    task = Of(of or BertConfig())
    recipe = read_recipe(["--output_dir", "out", "--dataset_name", "builtin:tweets", *argv], task.arguments())
    plan, problems = make_plan(recipe, environ, task)
    return problems + preflight(plan, task)


def test_a_sound_plan_has_no_problem() -> None:
    assert found() == found(**TWO_RANKS) == []


def test_every_concern_is_reported_at_once() -> None:
    problems = found(
        *("--sed", "1", "--resume_from_checkpoint", "no", "--push_to_hub", "--global_batch_size", "7"),
        *("--logging_nan_inf_filter", "true", "--optim", "paged_adamw_8bit"),
        **TWO_RANKS,
        ACCELERATE_USE_FSDP="true",
        FSDP_VERSION="2",
    )
    assert [each.flag or str(each).split()[0] for each in problems] == [
        *("--sed", "--global_batch_size", "--logging_nan_inf_filter", "--push_to_hub", "--resume_from_checkpoint"),
        "--optim",
    ]


def test_nothing_is_written(tmp_path: Path) -> None:
    found("--fp16", "true")
    assert [*tmp_path.iterdir()] == []


def test_restarts_from_a_named_checkpoint_are_refused() -> None:
    write(Path("out"), 4)
    batch = ("--global_batch_size", "8")  # that the checkpoint was written with
    named = found(*batch, "--resume_from_checkpoint", "out/checkpoint-4", TORCHELASTIC_MAX_RESTARTS="3")
    assert codes(named) == [("restarts-from-named-checkpoint", "--resume_from_checkpoint")]
    for others in ((), ("--resume_from_checkpoint", "auto")):
        assert found(*batch, *others, TORCHELASTIC_MAX_RESTARTS="3") == []


def test_texts_beyond_longropes_original_length_are_refused() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}
    config = Phi3Config(original_max_position_embeddings=8, rope_parameters=rope)
    assert found("--max_length", "8", of=config) == []
    assert codes(found("--max_length", "9", of=config)) == [("max-length-over-positions", "--max_length")]


def test_an_adapter_on_another_commit_of_the_hub_is_refused() -> None:
    noted = {"name": "me/base", "revision": "main", "commit_hash": "abc"}
    checkpoint = write(Path("out"), 4)
    (checkpoint / "base_model.json").write_text(json.dumps(noted))
    digests = store.sync_files(checkpoint, store.files_in(checkpoint))
    (checkpoint / store.MANIFEST).write_text(manifest(4, files=digests).to_json())
    config = BertConfig()
    config._commit_hash = "def"
    problems = found("--resume_from_checkpoint", "auto", "--method", "lora", of=config)
    assert any("abc" in str(each) and "def" in str(each) for each in problems)
