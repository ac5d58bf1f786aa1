"""What doctor says of a token, as a Hub on this machine answers."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from indictune.doctor.check_lines import Outcome
from indictune.doctor.run_files import hub_line
from tests.faults.hub import Fault, Hub
from tests.hub.conftest import TOKEN
from tests.ranks.launching import free_port

WRITE = "/auth-check/write"
MISSING = {"X-Error-Code": "RepoNotFound"}


def asked(repository: str | None = "model") -> Outcome:
    line = hub_line(repository)
    assert TOKEN not in line.text()
    return line


def test_a_token_that_may_write_is_ok(server: Hub) -> None:
    line = asked()
    assert (line.status, line.found) == ("ok", "me may write to me/model")
    assert b"/api/models/me/model/auth-check/write" in server.sent
    assert f"Bearer {TOKEN}" in server.tokens
    assert asked("team/model").found == "me may write to team/model"


@pytest.mark.parametrize(("part", "code"), [(WRITE, 403), ("/whoami", 401)])
def test_a_refused_token_fails(server: Hub, part: str, code: int) -> None:
    server.faults = [Fault(part, code)]
    line = asked()
    assert line.status == "fail"
    assert line.found.startswith("refused access to model: ")
    assert line.cure


@pytest.mark.parametrize(
    ("repository", "role", "status"),
    [
        ("model", "write", "ok"),
        ("team/model", "write", "ok"),
        ("others/model", "write", "fail"),
        ("model", "read", "fail"),
    ],
)
def test_a_missing_repository_must_be_one_that_the_run_can_make(
    server: Hub, repository: str, role: str, status: str
) -> None:
    server.role, server.faults = role, [Fault(WRITE, 404, headers=MISSING)]
    assert asked(repository).status == status


def test_a_hub_that_does_not_answer_is_a_warning(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (Fault("/whoami", "drop"), Fault("/whoami", 429), Fault(WRITE, 503)):
        server.faults = [fault]
        assert asked().status == "warn"
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert asked().status == "warn"


def test_the_hub_is_asked_only_by_a_run_that_pushes(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(None).status == "ok"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert asked().status == "warn"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert asked().status == "fail"
    assert server.sent == []
