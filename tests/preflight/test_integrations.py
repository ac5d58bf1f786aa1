"""A token that a push needs is asked for before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.errors import UserError
from indictune.preflight.integrations import check_hub_token, check_loggers, check_repository


@pytest.fixture(autouse=True)
def _no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))


def test_nothing_is_pushed_without_asking() -> None:
    check_hub_token(push_to_hub=False)


def test_a_push_without_a_token_is_refused_with_the_ways_to_give_one() -> None:
    with pytest.raises(UserError) as raised:
        check_hub_token(push_to_hub=True)
    assert raised.value.problems == [
        "--push_to_hub: there is no Hugging Face token. Set HF_TOKEN, or type `hf auth login` once."
    ]


@pytest.mark.parametrize(
    ("hub_model_id", "folder", "told"),
    [
        (None, "outputs/my run", "--push_to_hub: --output_dir outputs/my run: is no name of a repository"),
        (None, "outputs/मॉडल", "--push_to_hub: --output_dir outputs/मॉडल: is no name"),
        ("a/b/c", "outputs/run", "--hub_model_id a/b/c: is no name"),
    ],
)
def test_a_repository_that_cannot_be_is_refused(hub_model_id: str | None, folder: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        check_repository(hub_model_id, Path(folder))
    (problem,) = raised.value.problems
    assert problem.startswith(told)
    assert problem.endswith(" Give --hub_model_id YOU/NAME.")


def test_any_other_is_not() -> None:
    for hub_model_id, folder in (("me/run", "my run"), ("run", "my run"), (None, "outputs/run"), (None, ".")):
        check_repository(hub_model_id, Path(folder))


def test_a_token_comes_from_the_environment_or_the_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "no token").write_text("hf_login")
    check_hub_token(push_to_hub=True)
    (tmp_path / "no token").unlink()
    monkeypatch.setenv("HF_TOKEN", "hf_environment")
    check_hub_token(push_to_hub=True)


def test_a_list_of_loggers_holds_loggers_alone() -> None:
    check_loggers(["none"])
    for name in ("none", "all"):
        with pytest.raises(UserError, match=f"^--report_to {name} tensorboard: {name} stands alone; "):
            check_loggers([name, "tensorboard"])
