"""Wrong values are refused before the slow imports, by the words of the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from docs.generate import TRAINING
from indictune import cli
from indictune.commands import VERBS
from indictune.config.command_line import SCRIPTS, CommandLine, flags_of
from indictune.config.early_values import value_problems
from indictune.config.recipe import read_recipe
from indictune.errors import Problem
from tests.plans import codes
from tests.ranks.launching import start

HEAVY = ("torch", "transformers", "accelerate", "datasets", "numpy")
MODEL, NO_FILE = "no-model --model", "no-such-file --"
NO_MODEL = "train sentiment --train_file rows.csv --model_name_or_path"
# A command, and code and flag of each problem.
WRONG: list[tuple[str, list[str]]] = [
    ("train sentiment --train_file no.csv --seed x", ["wrong-type --seed", f"{NO_FILE}train_file"]),
    (f"{NO_MODEL} ./no", ["no-such-model-folder --model_name_or_path"]),
    (f"{NO_MODEL} empty", ["folder-without-model --model_name_or_path"]),
    (f"{NO_MODEL} ?/x", ["model-not-found-offline --model_name_or_path"]),
    ("train sentiment --train_file rows.csv --resume_from_checkpoint no", ["resume-damaged --resume_from_checkpoint"]),
    ("checkpoint no", ["no-checkpoints indictune checkpoint"]),
    ("distil no --train_file rows.csv --output_dir out", [MODEL]),
    ("prepare --train_file rows.csv --learning_rate nan", ["not-finite --learning_rate"]),
    ("prepare --train_file rows.csv --lora_r 0", ["expected-at-least --lora_r"]),
    ("inspect no.csv", [f"{NO_FILE}train_file"]),
    ("evaluate --model empty --test_file no.csv", [MODEL, f"{NO_FILE}test_file"]),
    ("evaluate --compare empty no", ["compare-needs-predictions --compare"] * 2),
    ("predict no --input_file no.csv --max_length 1.5", [MODEL, "wrong-type --max_length", f"{NO_FILE}input_file"]),
    ("serve empty --port abc", [MODEL, "wrong-type --port"]),
    ("demo no", [MODEL]),
    ("chat no --temperature x", [MODEL, "wrong-type --temperature"]),
    ("export no", [MODEL]),
    ("merge no --output_dir out", ["adapter-config-unreadable --model"]),
    ("push empty a//b", ["nothing-to-push indictune push", "repository-name indictune push"]),
    ("report no", ["report-needs-run indictune report"]),
    ("sweep sentiment --train_file no.csv --seeds x", ["wrong-type --seeds", f"{NO_FILE}train_file"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.csv").write_text("text,label\na,b\nc,d\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_verbs_refuse_them_before_the_slow_imports(folder: Path) -> None:
    program = f"""
import json, os, sys
from indictune.cli import main
os.chdir({str(folder)!r})
os.environ["INDICTUNE_STATUS_FILE"] = "status.json"
for words in {[words.split() for words, _ in WRONG]}:
    code = main(words)
    problems = [f"{{each['code']}} {{each['flag']}}" for each in json.load(open("status.json"))["problems"]]
    print(json.dumps([code, problems, [name for name in {HEAVY} if name in sys.modules]]))
"""
    done = start([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [[2, problems, []] for _, problems in WRONG]
    assert not (folder / "out").exists()


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_scripts_refuse_them_before_the_slow_imports(folder: Path, script: str) -> None:
    program = f"""
import runpy, sys
sys.argv = [{script!r}, "--config", {str(folder / "r.yaml")!r}, "--train_file", "no.csv"]
try:
    runpy.run_path("scripts/{script}", run_name="__main__")
except SystemExit as end:
    print(end.code, [name for name in {HEAVY} if name in sys.modules])
"""
    (folder / "r.yaml").write_text("learning_rate: fast\ntest_file: dropped.csv\nmodel_name_or_path: ./no\n")
    done = start([sys.executable, "-c", program])
    assert done.stdout == "2 []\n"
    lines = done.stderr.splitlines()
    assert lines[0] == "indictune: 3 problems:"
    assert [line.rpartition(" ")[2] for line in lines[1:]] == [
        "[wrong-type]",
        "[no-such-file]",
        "[no-such-model-folder]",
    ]


def early(flags: dict[str, list[str]], task: str = "classification") -> list[Problem]:
    return value_problems(CommandLine(flags), [task])


@pytest.mark.parametrize("task", SCRIPTS)
@pytest.mark.parametrize("word", ["x", "1.5", "auto", "nan", "", "-3"])
def test_a_number_is_refused_by_the_words_of_the_run(task: str, word: str) -> None:
    """For every flag: the types in flags.json are those of the dataclasses."""
    kinds = ("number", "whole number", "whole number or text")
    names = [name for name, flag in flags_of(task).items() if flag.values in kinds]
    assert len(names) > 40
    flags = {name: [word] for name in names}
    types = read_recipe(flags, TRAINING[f"scripts/{SCRIPTS[task]}"]).problems
    found = [each for each in early(flags, task) if each.code in ("wrong-type", "not-finite")]
    assert set(map(str, found)) == set(map(str, types))


def test_what_only_the_run_can_tell_is_left_to_it(folder: Path) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    models = ["builtin:none", "fetched:none", "some/model", "model", "adapter"]
    assert [name for name in models if early({"model_name_or_path": [name]})] == []
    files = ["*.none", "{language}.csv", "https://a.org/no.csv", "rows.csv", "empty"]
    assert early({"train_file": files}) == []
    assert early({"train_files": ['{"path": "no.csv", "weight": 2}', "{broken"]}) == []
    assert codes(early({"train_files": ["no.csv"]})) == [("no-such-file", "--train_files")]
    assert early({"hub_model_id": ["a b"]}) == []  # nothing is pushed
    assert codes(early({"hub_model_id": ["a b"], "push_to_hub": ["true"]})) == [("repository-name", "--hub_model_id")]
    assert early({"learning_rate": ["x"], "hub_model_id": ["hf_" + "a" * 34]}) == []  # a token


def test_a_run_under_a_launcher_reports_them_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def reported(*_: object) -> list[Problem]:
        raise AssertionError

    monkeypatch.setattr(cli, "_wrong_values", reported)
    with pytest.raises(AssertionError):
        cli._check_names(VERBS["predict"], [], {})
    monkeypatch.setenv("LOCAL_RANK", "0")
    cli._check_names(VERBS["predict"], [], {})


def test_a_flag_overrides_the_recipe(folder: Path) -> None:
    content = {"train_file": "no.csv", "model_name_or_path": "./no"}
    read = CommandLine({"model_name_or_path": ["a/b"], "test_file": ["rows.csv"]}, Path("r.yaml"), content)
    assert value_problems(read, ["classification"]) == []
    read = CommandLine({}, Path("r.yaml"), content)
    assert codes(value_problems(read, ["classification"])) == [
        ("no-such-file", "--train_file"),
        ("no-such-model-folder", "--model_name_or_path"),
    ]
