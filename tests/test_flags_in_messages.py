"""A message names only flags that the verb has which says it.

Followed are names: of functions, classes and tables of the package, from the file of a verb on. A method belongs to
its class. So a code may be found that the verb cannot reach; `NOT_SAID` has these, each with its reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from indictune.errors import catalogue
from tests.ranks.launching import ROOT

# The other verbs take the flags of a training.
VERBS = ("chat", "demo", "export", "merge", "predict", "push", "report", "serve")
NOT_SAID = {
    "base-revision-differs": "only merge takes a revision",
    "class-names-unclear": "of a dataset, not of a file",
    "class-undeclared": "of a dataset, not of a file",
    "fewer-wait-than-come": "the demo has no such flags, and the defaults fit",
    "label-map-form": "checked where it is given, which is a training or an evaluation",
    "launcher-missing": "its environment names a strategy, which only a training has",
    "long-text-of-pairs": "of a training",
    "model-needs-its-code": "of a configuration; push reads none, and the others have the flag",
    "pair-of-one-column": "of a training",
    "long-text-impossible": "a model of windows was trained with this tokenizer",
    "max-length-over-positions": "the length is that of the training",
    "no-repository": "of a training that pushes",
    "one-process-started": "its strategy is of a training",
    "template-doubles-thoughts": "rows of a training are written",
    "template-drops-text": "rows of a training are written",
    "template-rewrites-prompt": "rows of a training are written",
}
# Of a file of texts, which `export` tells with a way out of its own.
OF_TEXTS = {"column-missing", "column-names-count", "half-emoji", "header-missing", "more-bad-rows", "one-column"}
OF_TEXTS |= {"no-such-sheet", "row-of-many-lines", "row-unreadable", "value-of-wrong-type"}
Name = tuple[str, str]  # module and name


def _without_annotations(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    yield from _without_annotations(each)


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [each.id for each in targets if isinstance(each, ast.Name)]


@pytest.fixture(scope="module")
def graph() -> tuple[dict[Name, set[Name]], dict[Name, set[str]]]:
    """Which names a name uses, and which codes it has."""
    files = sorted((ROOT / "indictune").rglob("*.py"))
    trees = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in files
    }
    uses, codes = defaultdict[Name, set[Name]](set), defaultdict[Name, set[str]](set)
    for module, tree in trees.items():
        imported: dict[str, Name] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("indictune"):
                imported |= {each.asname or each.name: (str(node.module), each.name) for each in node.names}
        here = {name for node in tree.body for name in _names(node)}
        for node in tree.body:
            for name in _names(node):
                for each in _without_annotations(node):
                    if isinstance(each, ast.Name) and each.id in {*here, *imported}:
                        uses[module, name].add(imported.get(each.id, (module, each.id)))
                    elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                        package, owner = imported.get(each.value.id, ("", ""))
                        uses[module, name].add((f"{package}.{owner}", each.attr))
                    elif isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in catalogue():
                        codes[module, name].add(each.value)
    return uses, codes


def flags_in(code: str) -> set[str]:
    """The flags that a message names, but not those of whole commands and of runs that were."""
    entry = catalogue()[code]
    text = re.sub(r"`[^`]*`|--output_dir", "", f"{entry['problem']} {entry['way_out']}")
    return set(re.findall(r"--(\w+)", text)) - {"help"}


@pytest.mark.parametrize("verb", VERBS)
def test_a_message_of_a_verb_names_its_flags(
    graph: tuple[dict[Name, set[Name]], dict[Name, set[str]]], verb: str
) -> None:
    uses, codes = graph
    module = f"indictune.commands.{verb}"
    reached, todo = set[Name](), [name for name in {*uses, *codes} if name[0] == module]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += uses.get(name, ())
    lines = (ROOT / "indictune/config/flags.json").read_text(encoding="utf-8")
    known = {each["name"] for each in json.loads(lines) if f"indictune {verb}" in each["of"]}
    found = {code for name in reached for code in codes.get(name, ())}
    assert len(found) > 5
    found -= NOT_SAID.keys() | (OF_TEXTS if verb == "export" else set())
    wrong = {code: flags for code in found if (flags := flags_in(code) - known)}
    assert wrong == {}
