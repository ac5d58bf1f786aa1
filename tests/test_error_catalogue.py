"""Every user error in the code has an entry in errors.toml, and gives what the entry's templates ask for."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator

from indictune.errors import UserError, catalogue, problem
from tests.ranks.launching import ROOT

FILES = sorted([*(ROOT / "indictune").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
NAMES = ("flag", "value", "way_out")


def calls() -> Iterator[tuple[str, str, set[str]]]:
    """Place, code and names of the details of each `UserError(...)`, `problem(...)` and `.add(...)` with a code."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            code = node.args[0].value
            if name in ("UserError", "problem") and isinstance(code, str) and " " not in code:
                given = {*NAMES[: len(node.args) - 1], *(each.arg or "**" for each in node.keywords)}
                yield f"{path.relative_to(ROOT)}:{node.lineno}", code, given


def asked_for(code: str, way_out_is_given: bool) -> set[str]:
    entry = catalogue()[code]
    texts = [entry["problem"], *([] if way_out_is_given else [entry.get("way_out", "")])]
    fields = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    return {name.partition(".")[0].partition("[")[0] for name in fields}


def test_an_error_gives_what_its_wording_asks_for() -> None:
    found = list(calls())
    assert len(found) > 200
    assert [place for place, code, _ in found if code not in catalogue()] == []
    missing = {
        f"{place} {code}": asked_for(code, "way_out" in given) - {*given, "flag", "value"}
        for place, code, given in found
        if "**" not in given
    }
    assert {place: names for place, names in missing.items() if names} == {}


def test_a_message_ends_with_its_code() -> None:
    error = UserError("expected-at-least", "--save_total_limit", 0, smallest=1)
    assert (error.code, error.flag) == ("expected-at-least", "--save_total_limit")
    assert str(error).startswith("--save_total_limit 0: expected at least 1. ")
    assert str(error).endswith(" [expected-at-least]")
    assert str(problem("unreadable", "--config", "a\nb", reason="x")).count("\n") == 0


def test_every_entry_has_a_way_out() -> None:
    assert [code for code, entry in catalogue().items() if not entry.get("way_out")] == []


def test_every_entry_is_used() -> None:
    """As a literal anywhere in the code: some codes are chosen by a condition or kept in a table."""
    words = {
        node.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(catalogue().keys() - words) == []
