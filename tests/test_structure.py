"""The order of the house: which package may import which, and how large things may become."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks.launching import ROOT, python, start

# Each may import those of the lines above it, and itself.
LAYERS = [
    {"indictune.credentials", "indictune.errors", "indictune.console_text", "indictune.stop_signals"}
    | {"indictune.upstream", "indictune.versions"},
    {"indictune.config"},
    {"indictune.run", "indictune.files", "indictune.before_imports", "indictune.python_objects"}
    | {"indictune.ray_cluster"},
    {"indictune.data", "indictune.models", "indictune.evaluation"},
    {"indictune.tasks"},
    {"indictune.distributed"},
    {"indictune.planning"},
    {"indictune.doctor"},
    {"indictune.checkpoint"},
    {"indictune.hub", "indictune.report"},
    {"indictune.preflight"},
    {"indictune.training"},
    {"indictune.supervise"},
    {"indictune.prediction"},
    {"indictune.parity_traces", "indictune.serving", "indictune.sweep"},
    {"indictune.commands"},
    {"indictune.cli", "indictune.__main__", "scripts"},
    {"indictune.api", "indictune.own_process", "indictune.run_result", "indictune"},  # what `import indictune` gives
]
TOP_LEVEL = {
    *(".ci", ".dockerignore", ".gitignore", "CONTRIBUTING.md", "Dockerfile", "LICENSE", "Makefile", "README.md"),
    *("SECURITY.md", "accelerate_configs", "benchmarks", "constraints.txt", "docs", "ds_configs", "indictune"),
    *("mkdocs.yml", "pyproject.toml", "recipes", "scripts", "tests"),
}
FILES = sorted([*(ROOT / "indictune").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> Iterator[str]:
    """Full names of everything that a file imports, inside functions too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int:
    """The line of `LAYERS` that a module stands in; its longest name counts."""
    matches = [
        (len(member), index)
        for index, members in enumerate(LAYERS)
        for member in members
        if module == member or module.startswith(f"{member}.")
    ]
    assert matches, f"{module} is in no layer"
    return max(matches)[1]


def test_what_runs_leave_behind_is_not_kept() -> None:
    """accelerate writes the environment of whoever starts several nodes to `.deepspeed_env`."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("no checkout of git")
    assert {name.partition("/")[0] for name in done.stdout.splitlines()} == TOP_LEVEL


def test_the_layers_are_distinguished() -> None:
    assert len(FILES) > 30
    assert layer_of("indictune.errors.UserError") == 0
    assert layer_of("indictune.config.recipe.Recipe") == 1
    assert layer_of("indictune.data.batching") == layer_of("indictune.models.load.load_config") == 3
    assert layer_of("scripts.train_sentiment") == 16


def test_imports_point_one_way() -> None:
    upward = [
        f"{module_name(path)} imports {name}"
        for path in FILES
        for name in imported(path)
        if name.split(".")[0] in ("indictune", "scripts") and layer_of(name) > layer_of(module_name(path))
    ]
    assert upward == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Inside functions and under `TYPE_CHECKING` neither."""
    modules = {module_name(path): path for path in FILES}
    imports = {
        module: {each if each in modules else each.rpartition(".")[0] for each in imported(path)} & modules.keys()
        for module, path in modules.items()
    }
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the files


def test_arguments_and_recipes_import_only_basic_modules() -> None:
    known = {"indictune.errors", "indictune.credentials"}
    light = ("shared_arguments", "command_line", "early_values")
    known |= {f"indictune.config.{name}" for name in light}
    for name in ("arguments", "recipe"):
        ours = {name for name in imported(ROOT / f"indictune/config/{name}.py") if name.startswith("indictune")}
        assert {name.rpartition(".")[0] for name in ours} <= known


def test_the_packages_of_a_line_stay_apart_but_for_models_that_read_the_built_in_tweets() -> None:
    allowed = {
        ("indictune.models", "indictune.data.text.cleaning"),  # the tokenizer learns from the texts that a run sees
        ("indictune.data", "indictune.config.arguments"),
    }
    peers = ("indictune.data", "indictune.models", "indictune.evaluation")
    for path in FILES:
        own = ".".join(module_name(path).split(".")[:2])
        for name in imported(path):
            other = ".".join(name.split(".")[:2])
            if own in peers and other in peers and own != other:
                assert (own, name.rpartition(".")[0]) in allowed, f"{module_name(path)} imports {name}"


def test_batching_imports_torch_alone() -> None:
    outside = {name.split(".")[0] for name in imported(ROOT / "indictune/data/batching.py")}
    assert outside - sys.stdlib_module_names == {"torch"}


STRATEGY = re.compile(
    r"fsdp|zero_?[123]|zero_stage|\bddp\b|\b(?:ddp|ds)_|distributeddataparallel|fully_shard", re.IGNORECASE
)
# The Trainer's own names for flags, which a file that passes them on has to spell.
FLAGS = {"fsdp", "ddp_timeout", "ddp_backend"}


def words_of(tree: ast.Module) -> Iterator[str]:
    """Identifiers and strings of a module, without comments and docstrings, which may give a reason."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        for field in ("id", "attr", "name", "arg", "asname", "module"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word


def test_the_words_of_a_module_are_its_code_not_its_reasons() -> None:
    tree = ast.parse(
        '"""FSDP: why."""\nimport fsdp_x as y  # DDP\ndef f(a, b=1):\n    """ZeRO-3."""\n    return a.b("s")'
    )
    assert set(words_of(tree)) == {"fsdp_x", "y", "f", "a", "b", "s"}
    names = ("use_fsdp", "zero3", "DDP", "ZERO_2", "ds_shape", "fully_shard")
    assert [word for word in names if not STRATEGY.search(word)] == []
    assert [word for word in ("zero_grad", "zeros", "added", "zero-width") if STRATEGY.search(word)] == []


def test_no_code_outside_strategy_names_a_strategy() -> None:
    with_strategies = {ROOT / "indictune/distributed", ROOT / "indictune/planning"}  # its formulas differ by strategy
    outside = [path for path in FILES if with_strategies.isdisjoint(path.parents)]
    named = {path: {word for word in words_of(parsed(path)) if STRATEGY.search(word)} - FLAGS for path in outside}
    assert {path: words for path, words in named.items() if words} == {}


def test_files_stay_small() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {path: number for path, number in lines.items() if number > 400} == {}


def test_the_house_has_few_rooms() -> None:
    ours = [path for path in FILES if (ROOT / "indictune") in path.parents]
    assert len(ours) <= 230
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in ours) <= 43_670


def test_no_name_is_given_twice() -> None:
    """Of public functions and classes, and of modules but verbs and what a package keeps of other libraries."""
    ours = [path for path in FILES if (ROOT / "indictune") in path.parents and path.name != "__init__.py"]
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [node.name for path in ours for node in parsed(path).body if isinstance(node, definitions)]
    assert [name for name, count in Counter(public).items() if count > 1 and not name.startswith("_")] == []
    modules = Counter(path.stem for path in ours if path.parent.name != "commands")
    assert [name for name, count in modules.items() if count > 1] == ["upstream"]


def test_functions_stay_small() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 50
    ]
    assert long == []


def test_a_script_names_its_task_and_main_is_the_table_of_contents_of_a_run() -> None:
    scripts = sorted((ROOT / "scripts").glob("*.py"))
    assert len(scripts) == 8
    for path in scripts:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 30
        assert [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)] == []
    (main,) = (each for each in parsed(ROOT / RUN).body if isinstance(each, ast.FunctionDef))
    assert (main.end_lineno or 0) - main.lineno + 1 <= 40


RUN = "indictune/training/run_task.py"
# Only a run that asks for them may import them. transformers' Trainer (5.23) itself imports peft and bitsandbytes.
SLOW = {"lingua", "matplotlib", "optuna", "python_calamine", "sacrebleu", "seqeval", "sklearn", "trl"}


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What a run of the classifier executes and imports before `Trainer.train`, with an empty cache."""
    out = tmp_path_factory.mktemp("run") / "out"
    flags = ["--config", "recipes/sentiment/demo.yaml", "--output_dir", str(out)]
    cache = {"INDICTUNE_CACHE": str(out.parent / "cache")}
    start([*python(), "tests/up_to_training.py", "scripts/train_sentiment.py", *flags], cache, anew=True)
    found: dict[str, list[str]] = json.loads((out / "passed.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.more
def test_the_way_to_the_training_passes_few_files(passed: dict[str, list[str]]) -> None:
    executed, imported = passed["executed"], passed["imported"]
    assert {RUN, "indictune/training/start.py", "indictune/tasks/classification.py"} <= set(executed)
    assert len(executed) <= 60, executed
    assert len(imported) <= 112, imported
    assert set(passed["libraries"]) & SLOW == set()


def test_the_design_names_each_file_that_main_calls() -> None:
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    modules = {name.rpartition(".")[0] for name in imported(ROOT / RUN)}
    called = {f"{name.replace('.', '/')}.py" for name in modules if name.startswith("indictune.")}
    assert len(called) > 5
    assert [file for file in sorted({RUN, *called}) if f"`{file}`" not in design] == []


def test_a_task_can_be_one_short_file() -> None:
    assert len((ROOT / "indictune/tasks/tokens.py").read_text(encoding="utf-8").splitlines()) <= 200


def test_a_module_says_what_it_is_in_its_first_line() -> None:
    first = {path: (ast.get_docstring(parsed(path)) or "").split("\n\n")[0] for path in FILES}
    assert [path for path, line in first.items() if not line.endswith((".", ":"))] == []


@pytest.mark.parametrize(
    "statement",
    [
        "import indictune",
        "import indictune.commands.train",  # which only starts the processes that train
        "import indictune.cli; assert indictune.cli.main(['--help']) == 0",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str) -> None:
    heavy = ("torch", "transformers", "accelerate", "datasets", "numpy")
    check = f"import sys; print('heavy:', [name for name in {heavy} if name in sys.modules])"
    result = start([sys.executable, "-c", f"{statement}; {check}"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("heavy: []\n")


def imported_with(path: Path) -> Iterator[str]:
    """The modules and names that are imported when a file is: not in its functions, and not for types alone."""
    for node in parsed(path).body:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (name for each in node.names for name in (str(node.module), f"{node.module}.{each.name}"))


def test_a_plan_starts_without_what_only_rows_and_training_need() -> None:
    files = {module_name(path): path for path in FILES}
    found, left = set[str](), {"indictune.commands.plan"}
    while left:
        found |= left
        left = {name for module in left & files.keys() for name in imported_with(files[module])} - found
    assert len(found & files.keys()) > 80
    assert {name.partition(".")[0] for name in found} & {"datasets", "sklearn", "seqeval", "deepspeed"} == set()
    assert "transformers.Trainer" not in found
