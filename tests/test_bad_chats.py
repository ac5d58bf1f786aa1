"""Everything that the user of a LLaMA may get wrong: one message, exit code 2, and no weights read."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.models import builtin
from indictune.supervise.execute import execute
from indictune.tasks.chat import Chat
from indictune.training.run_task import run_task
from tests.data.published_templates import DROPS_TURNS, NOT_A_PREFIX
from tests.ranks.launching import ROOT, accelerate, start

SCRIPT = ROOT / "scripts" / "train_llama.py"
USER, ANSWER = {"role": "user", "content": "क्या?"}, {"role": "assistant", "content": "हाँ"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a good configuration and broken weights: loading it fails with an error that no test expects."""
    folder = tmp_path_factory.mktemp("model")
    for path in Path(builtin.resolve("builtin:tiny-indic-llama")).iterdir():
        shutil.copy(path, folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    return str(folder)


class Job:
    """A folder with rows, and the flags of a run that would work."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.flags = {"model_name_or_path": model, "output_dir": str(folder / "out"), "max_length": "64"}
        self.flags["train_file"] = self.write("train.jsonl", {"messages": [USER, ANSWER]})

    def write(self, name: str, *rows: object) -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    def words(self) -> list[str]:
        return [word for name, value in self.flags.items() for word in (f"--{name}", *value.split(" "))]

    def message(self, **flags: str) -> str:
        """What the run, with other flags, is refused with."""
        self.flags |= flags
        recipe = read_recipe(self.words(), (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments))
        assert execute(partial(run_task, Chat()), recipe) == 2
        status = json.loads((self.folder / "out" / "status.json").read_text(encoding="utf-8"))
        assert status["state"] == "user_error"
        return str(status["message"])


@pytest.fixture
def job(tmp_path: Path, model: str) -> Job:
    return Job(tmp_path, model)


ROWS: dict[str, tuple[list[object], str]] = {
    "no answer": ([{"messages": [USER]}], "answer-not-last"),
    "roles out of order": (
        [{"messages": [ANSWER, USER, ANSWER]}],
        "wrong-order",
    ),
    "an unknown role": (
        [{"messages": [{"role": "tool", "content": "x"}, ANSWER]}],
        "unknown-role",
    ),
    "an empty list": ([{"messages": []}], "answer-not-last"),
    "texts and messages in one file": (
        [{"messages": [USER, ANSWER]}, {"prompt": "a", "completion": "b"}],
        "forms-mixed",
    ),
    "an empty output": ([{"instruction": "a", "output": " "}], "no-answer"),
}


@pytest.mark.parametrize(("rows", "code"), ROWS.values(), ids=ROWS.keys())
def test_a_bad_row_is_reported_with_its_place(job: Job, rows: list[object], code: str) -> None:
    message = job.message(train_file=job.write("bad.jsonl", *rows))
    assert f"[{code}]" in message
    assert f"{job.folder / 'bad.jsonl'}:{len(rows)}" in message


@pytest.mark.parametrize(
    ("jinja", "culprit", "code"),
    [
        ("{% generation %}{% endgeneration %}", "--chat_template mine.jinja: ", "chat-template-without-marks"),
        (NOT_A_PREFIX, "--chat_template mine.jinja: ", "template-rewrites-prompt"),
        (DROPS_TURNS, "--train_file drops.jsonl:2: ", "template-drops-text"),
    ],
)
def test_a_template_that_does_not_show_its_answers_is_refused(
    job: Job, monkeypatch: pytest.MonkeyPatch, jinja: str, culprit: str, code: str
) -> None:
    monkeypatch.chdir(job.folder)
    Path("mine.jinja").write_text(jinja)
    job.write("drops.jsonl", *({"messages": [USER, ANSWER] * number} for number in (1, 2)))
    message = job.message(train_file="drops.jsonl", chat_template="mine.jinja")
    assert message.startswith(culprit)
    assert message.endswith(f"[{code}]")
    assert sorted(path.name for path in (job.folder / "out").iterdir()) == [".lock", "logs", "status.json"]


def test_a_template_is_refused_before_many_rows_are_read(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [USER, ANSWER]}] * 2_001 + [{"messages": [USER]}]
    train, validation = job.write("many.jsonl", *rows), str(job.folder / "none.jsonl")
    message = job.message(train_file=train, validation_file=validation, chat_template="llama4")
    of_the_flag, of_the_file = message.splitlines()[1:]
    assert of_the_flag.startswith("  1. --chat_template llama4: ")
    assert of_the_file.startswith(f"  2. --validation_file {validation}: ")
    assert of_the_file.endswith("[no-such-file]")
    assert "Reading only the first rows" in caplog.text
    message = job.message(train_file=train, validation_file=validation, chat_template="plain")
    assert f"{train}:2002: " in message
    assert "[answer-not-last]" in message


def test_a_tokenizer_without_a_template_is_refused_before_many_rows_are_read(job: Job) -> None:
    plain = job.folder / "plain"
    shutil.copytree(job.flags["model_name_or_path"], plain)
    (plain / "chat_template.jinja").unlink()
    rows = [{"messages": [USER, ANSWER]}] * 2_001 + [{"messages": [USER]}]
    message = job.message(train_file=job.write("many.jsonl", *rows), model_name_or_path=str(plain))
    assert "[chat-template-missing]" in message
    assert "many.jsonl" not in message


def test_a_target_that_matches_nothing_is_reported_with_the_names_that_exist(job: Job) -> None:
    message = job.message(method="lora", lora_target_modules="query")
    assert message.startswith("--lora_target_modules query: ")
    assert "[no-such-module]" in message


def test_a_target_that_matches_nothing_is_reported_with_what_else_does_not_fit_the_model(job: Job) -> None:
    flags = {"max_length": "513", "packing": "true", "attn_implementation": "flex_attention"}
    message = job.message(method="lora", lora_target_modules="query", **flags)
    assert re.findall(r"^  \d\. (--\w+)", message, re.MULTILINE) == [
        "--max_length",
        "--lora_target_modules",
        "--packing",
    ]


def test_rows_longer_than_the_model_has_positions_are_refused(job: Job) -> None:
    assert "--max_length 513: " in job.message(max_length="513")


def test_a_row_whose_answer_is_cut_off_is_refused(job: Job) -> None:
    message = job.message(max_length="8")
    assert f"{job.folder / 'train.jsonl'}:1" in message
    assert "--max_length" in message


def test_an_adapter_is_no_base(job: Job) -> None:
    folder = job.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "the/base"}')
    message = job.message(model_name_or_path=str(folder))
    assert "[adapter-as-model]" in message


def test_options_of_adapters_without_an_adapter_are_refused(job: Job) -> None:
    message = job.message(use_dora="true", modules_to_save="lm_head")
    assert message.count("has no effect with --method full.") == 2
    assert "--use_dora" in message
    assert "--modules_to_save" in message


def test_every_problem_is_reported_at_once(job: Job) -> None:
    message = job.message(max_length="513", global_batch_size="7", train_file="no.jsonl", metric_for_best_model="f1")
    for part in ("--max_length 513", "--global_batch_size 7", "--train_file no.jsonl: ", "--metric_for_best_model f1"):
        assert part in message


@pytest.mark.slow
def test_qlora_under_zero3_is_refused_before_anything_is_loaded(job: Job) -> None:
    job.flags["method"] = "qlora"
    result = start([*accelerate("zero3", 2), str(SCRIPT), *job.words()])
    assert result.returncode != 0
    assert "[quantised-weights-sharded]" in result.stderr
    assert "fsdp2_qlora.yaml" in result.stderr
    assert "Traceback" not in result.stderr.split("indictune:")[0]
