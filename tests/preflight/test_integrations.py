"""What a run needs from others is checked before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.preflight.checks import check_hub, check_loggers
from tests.plans import codes_of, plan_of


@pytest.fixture(autouse=True)
def _no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))


def test_a_run_that_is_not_pushed_needs_no_token() -> None:
    assert check_hub(plan_of(output_dir="my run")) == []


def test_a_push_needs_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of({"push_to_hub": True})
    assert codes_of(check_hub, plan) == [("hub-token-missing", "--push_to_hub")]
    (tmp_path / "no token").write_text("hf_login")
    assert check_hub(plan) == []
    (tmp_path / "no token").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    assert check_hub(plan) == []


@pytest.mark.parametrize(
    ("hub_model_id", "folder", "flag"),
    [
        (None, "outputs/my run", "--output_dir"),
        (None, "outputs/मॉडल", "--output_dir"),
        ("a/b/c", "outputs/run", "--hub_model_id"),
        ("me/run", "my run", None),
        ("run", "my run", None),
        (None, "outputs/run", None),
        (None, ".", None),
    ],
)
def test_a_push_needs_a_valid_name(
    monkeypatch: pytest.MonkeyPatch, hub_model_id: str | None, folder: str, flag: str | None
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    plan = plan_of({"push_to_hub": True, "hub_model_id": hub_model_id}, output_dir=folder)
    assert codes_of(check_hub, plan) == ([] if flag is None else [("repository-name", flag)])


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["none"], None),
        (["none", "tensorboard"], "logger-missing"),
        (["all", "tensorboard"], "logger-missing"),
        (["tensorbord"], "logger-missing"),
    ],
)
def test_loggers_are_known_and_installed(names: list[str], code: str | None) -> None:
    found = codes_of(check_loggers, plan_of({"report_to": names}))
    assert found == ([] if code is None else [(code, "--report_to")])
