"""`indictune explain CODE`, and the links of codes on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from indictune.cli import main
from indictune.errors import catalogue, linked
from tests.ranks.launching import ROOT


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["no-such-file"], ["[no-such-file]"], ["--code", "no-such-file"]):
        assert main(["explain", *words]) == 0
        shown = capsys.readouterr().out
        assert "FLAG VALUE: there is no such file." in shown
        assert "Check the path." in shown
    for code in catalogue():
        assert main(["explain", code]) == 0


@pytest.mark.parametrize(
    ("code", "hint"),
    [("no-such-fiel", "Did you mean no-such-file"), ("quantised", "of-quantised"), ("xyzzy", "lists all codes")],
)
def test_a_typing_error_gets_what_is_near(code: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 2
    assert hint in capsys.readouterr().err


def test_without_a_code_the_usage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 2
    assert "indictune explain CODE" in capsys.readouterr().err


def test_a_code_is_a_link_on_a_terminal_alone() -> None:
    text = "2 problems:\n  1. --a: b. [no-such-file]\n  2. --c [1]: d. [not-yaml]"
    assert linked(text, io.StringIO()) == text
    page = (ROOT / "docs/errors.md").as_uri()
    shown = linked(text, Terminal())
    assert f"\033]8;;{page}#not-yaml\033\\[not-yaml]\033]8;;\033\\" in shown
    assert shown.count("\033]8;;") == 4
    assert 'id="not-yaml"' in Path(ROOT / "docs/errors.md").read_text(encoding="utf-8")


def test_a_refusal_has_no_links_in_a_pipe_and_some_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, links in ((io.StringIO(), 0), (Terminal(), 2)):
        monkeypatch.setattr("sys.stderr", stream)
        assert main(["explain"]) == 2
        assert stream.getvalue().count("\033]8;;") == links
