"""Everything that the user may get wrong, through the real script: one message, no traceback, and nothing loaded."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from indictune.config.command_line import STATUS_FILE
from indictune.files import NOTHING_TO_DO
from indictune.models import builtin
from indictune.supervise.run_folder import check_free
from tests.conftest import FinishedRun
from tests.ranks.launching import SCRIPT, accelerate, deepspeed, python, start, torchrun

GOOD = [("फिल्म अच्छी थी", "positive"), ("बहुत बुरा", "negative"), ("ठीक है", "positive"), ("मत देखना", "negative")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose configuration can be read, and whose weights cannot: loading it fails unexpectedly."""
    folder = tmp_path_factory.mktemp("model")
    source = Path(builtin.resolve("builtin:tiny-indic-bert"))
    for path in source.iterdir():
        shutil.copy(path, folder)
    (folder / "model.safetensors").write_bytes(b"not weights")
    return str(folder)


@dataclass(frozen=True)
class Refused:
    """A run that was refused."""

    problems: list[str]
    stdout: str
    stderr: str

    @property
    def flags(self) -> list[str]:
        """The first word of each problem: the flag, or the file."""
        return [problem.split()[0].rstrip(":") for problem in self.problems]

    @property
    def codes(self) -> list[str]:
        """What stands before the sentence of each problem, and its code."""
        return [f"{each.partition(': ')[0]} {each.rpartition('[')[2].rstrip(']')}" for each in self.problems]


class Job:
    """A folder of data files, and the flags of a run that would work."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.flags = {"model_name_or_path": model, "output_dir": str(self.out)}
        for split in ("train", "validation"):
            texts = [(f"{text} {split}", label) for text, label in GOOD]
            self.write(f"{split}.jsonl", *texts)
            self.flags[f"{split}_file"] = self.path(f"{split}.jsonl")

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, name: str, *texts_and_labels: tuple[str, str]) -> None:
        rows = [{"text": text, "label": label} for text, label in texts_and_labels]
        content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (self.folder / name).write_text(content, encoding="utf-8")

    def start(self, *more: str, launcher: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        flags = [word for name, value in self.flags.items() for word in (f"--{name}", value)]
        variables = {"HF_TOKEN": "", "HF_TOKEN_PATH": self.path("no token"), STATUS_FILE: self.path("told.json")}
        return start([*(launcher or python()), SCRIPT, *flags, *more], variables)

    def refused(self, *more: str, launcher: list[str] | None = None) -> Refused:
        """Start the run and check how it was refused."""
        result = self.start(*more, launcher=launcher)
        status = json.loads((self.folder / "told.json").read_text(encoding="utf-8"))
        assert status["state"] == "user_error", result.stderr
        message = status["message"]
        assert result.stderr.count(message) == 1
        if launcher is None:
            assert result.returncode == 2
            assert result.stdout == ""
            first, *_ = result.stderr.splitlines()  # where it runs, unless the flags are refused
            before = f"{first}\n" if first.startswith("Training on ") else ""
            assert result.stderr == f"{before}indictune: {message}\n"
        else:
            # The launcher adds lines of its own, after ours; accelerate and torchrun turn every code into 1.
            assert result.returncode != 0
            before = result.stderr.partition(f"indictune: {message}\n")[0]
            assert "Traceback" not in before
        if self.out.exists():
            assert {path.name for path in self.out.iterdir()} <= {"status.json", "logs", ".lock"}
        lines = message.splitlines()
        if len(lines) == 1:
            return Refused(lines, result.stdout, result.stderr)
        assert lines[0] == f"{len(lines) - 1} problems:"
        return Refused([line.partition(". ")[2] for line in lines[1:]], result.stdout, result.stderr)


@pytest.fixture
def job(tmp_path: Path, model: str) -> Job:
    return Job(tmp_path, model)


def test_flags_recipe_files_batch_token_and_checkpoint_are_reported_together(job: Job) -> None:
    recipe = job.folder / "r.yaml"
    recipe.write_text("lerning_rate: 1\nmax_length: long\n")
    job.flags["train_file"] = job.path("trian.jsonl")
    refused = job.refused(
        *("--config", str(recipe), "--batchsize", "8", "--push_to_hub", "--resume_from_checkpoint", "nowhere"),
        *("--global_batch_size", "20", "--per_device_train_batch_size", "8", "--lora_r", "0"),
        *("--logging_nan_inf_filter", "true"),
    )
    assert refused.flags == [
        *(str(recipe), str(recipe), "--batchsize", "--lora_r", "--global_batch_size", "--logging_nan_inf_filter"),
        *("--push_to_hub", "--resume_from_checkpoint", "--train_file"),
    ]
    assert [problem.partition(": ")[2].split()[0] for problem in refused.problems[:2]] == [
        "lerning_rate:",
        "max_length",
    ]
    assert "Use a multiple of 8" in refused.problems[4]
    assert job.path("train.jsonl") in refused.problems[-1]  # the nearest name


REFUSED_FLAGS = (
    (["--global_batch_size", "0"], "--global_batch_size 0"),
    (["--save_strategy", "steps"], "--load_best_model_at_end requires the save and eval strategy to match"),
    (["--class_weights", "none.json"], "--class_weights none.json"),
    (["--model_name_or_path", "{no_tokenizer}"], "--model_name_or_path {no_tokenizer}"),
    (["--attn_implementation", "spda"], "--attn_implementation spda"),
    (["--optim", "sgd", "--optim_args", "momentum"], "--optim sgd --optim_args momentum"),
    (["--lr_scheduler_type", "warmup_stable_decay"], "--lr_scheduler_type warmup_stable_decay"),
)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--max_length", "513"], "--max_length 513"),
        *(pytest.param(*each, marks=pytest.mark.more) for each in REFUSED_FLAGS),
    ],
    ids=["model", "flag", "evaluations", "weights", "tokenizer", "attention", "optimizer", "schedule"],
)
def test_a_refused_run_reads_no_more_than_the_first_of_many_rows(job: Job, flags: list[str], problem: str) -> None:
    no_tokenizer = job.folder / "no_tokenizer"
    no_tokenizer.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(job.flags["model_name_or_path"], name), no_tokenizer)
    job.write("train.jsonl", *GOOD * 5_001, ("ठीक", ""))
    (job.folder / "other.jsonl").write_text('{"words": "ठीक", "label": "positive"}\n', encoding="utf-8")
    words = [flag.format(no_tokenizer=no_tokenizer) for flag in flags]
    result = job.start(*words, "--validation_file", job.path("other.jsonl"))
    assert result.returncode == 2
    of_the_flag, of_the_file = re.findall(r"^  \d\. (.*)$", result.stderr, re.MULTILINE)
    assert of_the_flag.startswith(problem.format(model=job.flags["model_name_or_path"], no_tokenizer=no_tokenizer))
    assert "other.jsonl" in of_the_file
    assert "--text_column" in of_the_file
    assert "first" in result.stderr.partition("indictune: 2 problems:")[0]  # a warning says what was read


@pytest.mark.more
def test_flags_for_speed_that_cannot_work_are_reported_together(job: Job) -> None:
    job.flags |= {"active_vocabulary": "on", "method": "lora", "padding_free": "on", "attn_implementation": "eager"}
    assert sorted(job.refused("--max_tokens_per_device", "0").flags) == [
        *("--active_vocabulary", "--max_tokens_per_device", "--padding_free")
    ]


@pytest.mark.more
def test_names_of_modules_are_reported_with_all_else_that_does_not_fit_the_model(job: Job) -> None:
    job.flags |= {"method": "lora", "lora_target_modules": "qury", "max_length": "5000"}
    job.flags |= {"padding_free": "on", "attn_implementation": "eager", "push_to_hub": "true"}
    assert sorted(job.refused().flags) == [
        *("--lora_target_modules", "--max_length", "--padding_free", "--push_to_hub", "--push_to_hub")
    ]


@pytest.mark.more
def test_a_limit_of_tokens_below_the_longest_row_names_the_rows(job: Job) -> None:
    result = job.start("--max_tokens_per_device", "4")
    assert result.returncode == 2
    message = result.stderr.splitlines()[-1]
    assert message.startswith("indictune: --max_tokens_per_device 4")
    assert [row in message for row in ("/train.jsonl:1", "/train.jsonl:4")] == [True, True]
    assert "--max_tokens_per_device 7" in message


@pytest.mark.more
def test_what_a_limit_of_tokens_leads_to_is_checked_too(job: Job) -> None:
    result = job.start("--max_tokens_per_device", "8", "--ddp_static_graph", "true")
    assert result.returncode == 2
    assert "[static-graph-with-accumulation]" in result.stderr


def test_broken_files_are_reported_together_with_their_lines(job: Job) -> None:
    train, validation, test = (job.path(name) for name in ("t.csv", "v.jsonl", "e.csv"))
    Path(train).write_text("words,lable\nअच्छा,positive\n", encoding="utf-8")
    Path(validation).write_bytes(
        b'{"text": "ok", "label": "positive"}\n{"text": "ok", "label"\n{"text": "\xff", "label": "negative"}\n'
    )
    Path(test).write_bytes(b"")
    job.flags |= {"train_file": train, "validation_file": validation, "test_file": test}
    assert job.refused().codes == [
        f"--train_file {train} column-missing",
        f"--train_file {train} column-missing",
        f"--validation_file {validation}:2 invalid-json",
        f"--validation_file {validation}:3 not-utf8",
        f"--test_file {test} no-rows",
    ]


def test_labels_are_checked_over_all_files(job: Job) -> None:
    job.write("one.jsonl", ("अच्छा", "positive"), ("ठीक", "positive"))
    job.flags["train_file"] = job.path("one.jsonl")
    train, validation = job.flags["train_file"], job.flags["validation_file"]
    assert job.refused().codes == [f"--train_file {train} one-label"]
    job.flags |= {"train_file": validation, "validation_file": job.path("other.jsonl")}
    job.write("other.jsonl", ("अच्छा", "good"))
    assert job.refused().codes == [f"--validation_file {job.path('other.jsonl')} label-unknown"]


def test_rows_without_any_text_are_reported(job: Job) -> None:
    job.write("blank.jsonl", (" ", "positive"), ("\n", "negative"))
    job.flags["train_file"] = job.path("blank.jsonl")
    assert job.refused().codes == [f"--train_file {job.path('blank.jsonl')} no-texts"]


def test_a_label_column_of_free_text_in_a_folder_that_holds_another_run(job: Job, finished_run: FinishedRun) -> None:
    texts = [f"यह फिल्म नंबर {number} है" for number in range(21)]
    job.write("text.jsonl", *((text, text) for text in texts))
    folder = Path(shutil.copytree(finished_run.folder, job.folder / "finished"))
    job.flags |= {"train_file": job.path("text.jsonl"), "output_dir": str(folder)}
    del job.flags["validation_file"]
    before = hashes(folder)
    refused = job.refused()
    assert refused.flags[0] == "--output_dir"
    assert refused.codes[1:] == [f"--train_file {job.path('text.jsonl')} labels-look-like-text"]
    assert hashes(folder) == before


@pytest.mark.more
def test_problems_of_the_schedule_come_with_the_others(job: Job, tmp_path: Path) -> None:
    flags = ("--save_strategy", "often", "--ddp_timeout", "0", "--logging_steps", "0", "--label_column", "lable")
    found = job.refused(*flags).flags
    assert set(found) >= {"--save_strategy", "--ddp_timeout", "--logging_steps"}
    assert len(found) == 5  # the column is missing in two files
    (problem,) = job.refused("--save_strategy", "steps").problems
    assert problem.startswith("--load_best_model_at_end requires")
    del job.flags["validation_file"]
    job.flags["validation_split"] = "0"
    for name, value in (("--early_stopping_patience", "3"), ("--lr_scheduler_type", "greedy")):
        (problem,) = job.refused(name, value).problems
        assert problem.startswith(f"{name} {value} ")
        assert problem.endswith("[needs-validation-rows]")


def test_resuming_a_finished_run_trains_nothing_and_changes_nothing(finished_run: FinishedRun) -> None:
    before = hashes(finished_run.folder)
    assert len(before) > 20
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(finished_run.folder)]
    result = start([*python(), SCRIPT, *flags, "--resume_from_checkpoint", "auto"])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{finished_run.folder}: {NOTHING_TO_DO}\n"
    assert hashes(finished_run.folder) == before
    other = ["--train_file", str(finished_run.recipe.with_name("validation.jsonl"))]
    other += ["--validation_file", str(finished_run.recipe.with_name("test.jsonl"))]
    result = start([*python(), SCRIPT, *flags, *other, "--resume_from_checkpoint", "auto"])
    assert (result.returncode, result.stdout) == (2, "")
    assert "[finished-with-other-rows]" in result.stderr
    assert hashes(finished_run.folder) == before


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.more
@pytest.mark.parametrize(
    "flags",
    [["--max_length", "513"], ["--class_weights", "balancd"], ["--metric_for_best_model", "macro_f1_or"]],
    ids=lambda flags: flags[0],
)
def test_what_depends_on_model_or_labels_is_reported_before_weights_are_read(job: Job, flags: list[str]) -> None:
    result = job.start(*flags)
    assert result.returncode == 2
    before, _, message = result.stderr.partition("indictune: ")
    assert message.startswith(" ".join(flags))
    assert "Traceback" not in before
    status = json.loads((job.out / "status.json").read_text())
    assert (status["state"], status["message"]) == ("user_error", message.rstrip())
    check_free(job.out, None)  # the corrected command may have the same folder


@pytest.mark.more
def test_without_an_output_dir_the_message_stands_alone(job: Job, tmp_path: Path) -> None:
    del job.flags["output_dir"]
    result = job.start("--train_file=")
    assert result.returncode == 2
    assert "[output-dir-missing]" in result.stderr
    assert "Traceback" not in result.stderr


class TestUnderLaunchers:
    """The message comes from one rank, once, before the launcher's own lines."""

    @pytest.mark.more
    def test_a_refused_run_says_once_that_it_has_not_read_the_rows(self, job: Job) -> None:
        job.write("train.jsonl", *GOOD * 5_001)
        result = job.start("--sed", "1", launcher=torchrun(2))
        assert result.stderr.count("Reading only the first rows") == 1
        assert "indictune: --sed: there is no such flag." in result.stderr

    def test_accelerate_that_was_asked_for_two_processes_and_starts_one(self, job: Job) -> None:
        refused = job.refused(launcher=[*accelerate("single_gpu", 2), "--cpu"])
        (found,) = refused.problems
        assert found.endswith("[one-process-started]")

    @pytest.mark.more
    def test_the_deepspeed_launcher_passes_the_exit_code_on(self, job: Job) -> None:
        job.flags["train_file"] = job.path("missing.jsonl")
        result = job.start("--deepspeed", "ds_configs/zero9.json", launcher=deepspeed(2))
        assert result.returncode == 2
        status = json.loads((job.out / "status.json").read_text(encoding="utf-8"))
        assert status["state"] == "user_error"
        assert result.stderr.count("indictune: 2 problems:") == 1
        assert f"--train_file {job.flags['train_file']}: there is no such file." in status["message"]
        assert "--deepspeed ds_configs/zero9.json" in status["message"]
        assert "Traceback" not in result.stderr

    @pytest.mark.more
    def test_plain_python_with_a_deepspeed_file(self, job: Job) -> None:
        (found,) = job.refused("--deepspeed", "ds_configs/zero2.json").problems
        assert found.endswith("[launcher-missing]")
