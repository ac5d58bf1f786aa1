"""`indictune push` against a Hub on this machine that fails in every way that a push has to outlive."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from indictune.cli import main
from indictune.files import _OF_A_CHECKPOINT
from indictune.hub import publish
from tests.faults.hub import Fault, Hub
from tests.hub.conftest import TOKEN
from tests.hub.folders import CONFIG, model_folder, write_weights

OTHER_TOKEN = "hf_OtherOtherOtherOtherOtherOther1234"
PUSHED = ["README.md", "config.json", "figures/curves.png", "metrics.json", "model.safetensors", "report.html"]
STAY = (
    *("training_args.bin", "optimizer.pt", "recipe.yaml", "predictions.jsonl", "train_log.jsonl", "mine.py"),
    *("other.safetensors", "logs/rank-0.log", "checkpoint-4/model.safetensors", "photo.png"),
)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between attempts, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a finished run, with files that are nobody's business."""
    made = model_folder(tmp_path / "out")
    write_weights(made)
    for name in (*PUSHED, *STAY):
        (made / name).parent.mkdir(exist_ok=True)
        if not (made / name).exists() and name != "README.md":
            (made / name).write_text("secret")
    return made


def weights_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_push_sends_the_model_its_card_and_its_report_alone(server: Hub, folder: Path) -> None:
    assert main(["push", str(folder), "me/out", "--private"]) == 0
    ((branch, _, paths),) = server.commits
    assert (branch, paths) == ("main", PUSHED)
    weights = weights_of(folder)
    assert server.files["model.safetensors"] == weights
    assert server.stored == {sha256(weights).hexdigest(): weights}
    assert {(each["name"], each["organization"], each["visibility"]) for each in server.made} == {
        ("out", "me", "private")
    }
    card = server.files["README.md"].decode()
    assert 'MODEL = "me/out"' in card
    ModelCard(card).validate()
    assert json.loads(server.sent[-1])["content"] == card  # which the Hub was asked about
    assert not any(str(folder.parent).encode() in body for body in server.sent)
    assert not any(TOKEN.encode() in body for body in server.sent)


def test_a_card_that_the_user_wrote_is_pushed_as_it_is(server: Hub, folder: Path) -> None:
    (folder / "README.md").write_text('# mine\nMODEL = "out"\nMODEL = "other"\n')
    assert main(["push", str(folder), "me/out"]) == 0
    assert server.files["README.md"].decode() == '# mine\nMODEL = "me/out"\nMODEL = "other"\n'


def test_a_report_goes_up_without_texts_of_rows(server: Hub, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    write_weights(folder)
    row = {
        "label": "neutral",
        "predicted": "positive",
        "wrongness": 0.75,
        "language": "hi",
        "text": "words of a person",
    }
    (folder / "mistakes.json").write_text(json.dumps({"test": [row]}))
    assert main(["report", str(folder)]) == 0
    before = files_of(folder)
    assert "words of a person" in (folder / "report.html").read_text()
    assert main(["push", str(folder), "me/out"]) == 0
    after = files_of(folder)
    assert {path: after[path] for path in before} == before  # here the report keeps them
    assert "<h1>out</h1>" in server.files["report.html"].decode()
    assert not any(b"words of a person" in content for content in server.files.values())
    assert "mistakes.json" not in server.files


def test_a_push_to_a_branch_and_a_pull_request(server: Hub, folder: Path) -> None:
    assert main(["push", str(folder), "me/out", "--revision", "v2"]) == 0
    assert b"/api/models/me/out/branch/v2" in server.sent
    assert main(["push", str(folder), "me/out", "--create_pr"]) == 0
    assert [branch for branch, *_ in server.commits] == ["v2", "refs/pr/1"]


@pytest.mark.parametrize("part", ["/repos/create", "/auth-check", "/preupload/", "/batch", "/stored/", "/commit/"])
@pytest.mark.parametrize("answer", [500, *(pytest.param(code, marks=pytest.mark.more) for code in (503, 429)), "drop"])
def test_a_hub_that_is_away_is_asked_again(
    server: Hub, folder: Path, waits: list[float], part: str, answer: int
) -> None:
    server.faults = [Fault(part, answer, times=3)]
    assert main(["push", str(folder), "me/out"]) == 0
    assert waits[:3] == [1, 2, 4]
    assert server.files["model.safetensors"] == weights_of(folder)


def test_a_hub_that_asks_for_a_pause_gets_it(server: Hub, folder: Path, waits: list[float]) -> None:
    server.faults = [Fault("/auth-check", 429, headers={"Retry-After": "17"})]
    assert main(["push", str(folder), "me/out"]) == 0
    assert waits == [17]


def test_a_repository_that_another_commit_holds_is_asked_again(server: Hub, folder: Path, waits: list[float]) -> None:
    server.faults = [Fault("/commit/", 409)]
    assert main(["push", str(folder), "me/out"]) == 0
    assert waits == [1]


def test_an_answer_that_does_not_come_is_not_waited_for(
    server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(publish, "WAITS_S", (0, 0))
    server.faults = [Fault("/commit/", "slow")]
    began = time.monotonic()
    assert main(["push", str(folder), "me/out"]) == 0
    assert time.monotonic() - began < 10
    assert server.files["model.safetensors"] == weights_of(folder)


@pytest.mark.parametrize(
    ("part", "status", "code"),
    [
        *(("/repos/create", 401, "hub-token-refused"), ("/auth-check", 401, "hub-token-refused")),
        *(("/auth-check", 403, "no-write-permission"), ("/repos/create", 400, "no-repository")),
    ],
)
def test_a_token_that_may_not_write_uploads_nothing(
    server: Hub, folder: Path, capsys: pytest.CaptureFixture[str], part: str, status: int, code: str
) -> None:
    server.faults = [Fault(part, status, times=9)]
    assert main(["push", str(folder), "me/out"]) == 2
    said = capsys.readouterr().err
    assert f"[{code}]" in said
    assert TOKEN not in said
    assert not any(b"/preupload/" in path for path in server.sent)


@pytest.mark.parametrize("answer", [403, 500, "drop"])
def test_a_push_that_fails_leaves_the_model_and_goes_on_by_the_command_that_it_prints(
    server: Hub, folder: Path, waits: list[float], capsys: pytest.CaptureFixture[str], answer: int
) -> None:
    server.faults = [Fault("/commit/", answer, times=99)]
    assert main(["push", str(folder), "me/out", "--revision", "v2"]) == 1
    before = files_of(folder)
    said = capsys.readouterr().err
    command = f"indictune push {folder} me/out --revision v2"
    assert said.rstrip().endswith(command)
    assert TOKEN not in said
    server.faults, server.sent = [], []
    assert main(command.split()[1:]) == 0
    assert not any(path.startswith(b"/stored/") for path in server.sent)  # the weights are there already
    assert server.files["model.safetensors"] == weights_of(folder)
    assert files_of(folder) == before


def test_a_pull_request_that_fails_goes_on_in_the_same_one(
    server: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.faults = [Fault("/commit/", 400)]
    assert main(["push", str(folder), "me/out", "--create_pr"]) == 1
    command = f"indictune push {folder} me/out --revision refs/pr/1"
    assert capsys.readouterr().err.rstrip().endswith(command)
    assert main(command.split()[1:]) == 0
    assert [branch for branch, *_ in server.commits] == ["refs/pr/1"]


def test_all_mistakes_come_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indictune.commands.push.get_token", lambda: None)
    assert main(["push", str(tmp_path), "a/b/c"]) == 2
    said = capsys.readouterr().err
    assert all(f"[{code}]" in said for code in ("nothing-to-push", "repository-name"))
    (tmp_path / "config.json").write_text("{}")  # without weights
    assert main(["push", str(tmp_path), "a/b"]) == 2
    said = capsys.readouterr().err
    assert all(f"[{code}]" in said for code in ("nothing-to-push", "hub-token-missing"))
    assert main(["push", "--revision", "x", "--create_pr"]) == 2
    said = capsys.readouterr().err
    assert all(f"[{code}]" in said for code in ("argument-missing", "push-revision-or-pr"))


def test_a_checkpoint_and_an_adapter_on_a_base_of_this_machine_are_not_pushed(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, adapter = model_folder(tmp_path / "checkpoint-4"), model_folder(tmp_path / "adapter")
    for name in _OF_A_CHECKPOINT:
        (checkpoint / name).touch()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    for made, code in ((checkpoint, "folder-in-checkpoint"), (adapter, "push-of-local-base")):
        write_weights(made)
        assert main(["push", str(made), "me/out"]) == 2
        assert f"[{code}]" in capsys.readouterr().err
    assert server.sent == []


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: (folder / "metrics.json").unlink(), "run-not-finished"),
        (lambda folder: (folder / "metrics.json").write_text(""), "run-not-finished"),
        (lambda folder: (folder / "model.safetensors").write_bytes(weights_of(folder)[:1500]), "model-unreadable"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors"), "weights-missing"),
        (lambda folder: write_weights(folder, np.nan), "weights-not-numbers"),
        (lambda folder: (folder / "README.md").write_text(f"hf download --token {OTHER_TOKEN}"), "token-in-card"),
        (lambda folder: (folder / "README.md").write_text("key = 'sk-proj-Canary_Canary-Canary1'"), "token-in-card"),
        (lambda folder: (folder / "README.md").write_text("see https://me:secret@host/x"), "token-in-card"),
    ],
)
def test_what_is_not_fit_for_others_is_not_pushed_nor_exported(
    server: Hub, folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], code: str
) -> None:
    (folder / "train_log.jsonl").touch()
    damage(folder)
    for words in (["push", str(folder), "me/out"], ["demo", str(folder), "--export", str(folder.parent / "space")]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"[{code}]" in said
        assert OTHER_TOKEN not in said
    assert server.sent == []
    assert not (folder.parent / "space").exists()


def test_a_models_own_code_is_pushed_with_it(server: Hub, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "mine.Mine"}}))
    assert main(["push", str(folder), "me/out"]) == 0
    assert "mine.py" in server.files
