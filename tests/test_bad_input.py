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

from indictune.models import builtin
from indictune.supervise.run_folder import check_free
from tests.conftest import FinishedRun
from tests.ranks.launching import SCRIPT, accelerate, deepspeed, python, start, torchrun

GOOD = [("फिल्म अच्छी थी", "positive"), ("बहुत बुरा", "negative"), ("ठीक है", "positive"), ("मत देखना", "negative")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose configuration can be read, and whose weights cannot: what loads it fails otherwise than told."""
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
        no_token = {"HF_TOKEN": "", "HF_TOKEN_PATH": self.path("no token")}
        return start([*(launcher or python()), SCRIPT, *flags, *more], no_token)

    def refused(self, *more: str, launcher: list[str] | None = None) -> Refused:
        """Start the run and check how it was refused."""
        result = self.start(*more, launcher=launcher)
        status = json.loads((Path(self.flags["output_dir"]) / "status.json").read_text(encoding="utf-8"))
        assert status["state"] == "user_error", result.stderr
        message = status["message"]
        assert result.stderr.count(message) == 1
        if launcher is None:
            assert result.returncode == 2
            assert result.stdout == ""
            assert result.stderr == f"indictune: {message}\n"
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


def test_flags_recipe_files_batch_token_and_checkpoint_are_told_together(job: Job) -> None:
    recipe = job.folder / "r.yaml"
    recipe.write_text("lerning_rate: 1\nmax_length: long\n")
    job.flags["train_file"] = job.path("trian.jsonl")
    problems = job.refused(
        *("--config", str(recipe), "--batchsize", "8", "--push_to_hub", "--resume_from_checkpoint", "nowhere"),
        *("--global_batch_size", "20", "--per_device_train_batch_size", "8", "--lora_r", "0"),
        *("--logging_nan_inf_filter", "true"),
    ).problems
    assert problems == [
        f"{recipe}: lerning_rate: there is no such recipe key. Did you mean `learning_rate`?",
        f"{recipe}: max_length long: invalid int value: 'long'.",
        "--batchsize: there is no such flag. Did you mean `--global_batch_size`?",
        "--lora_r 0: expected a whole number of at least 1.",
        "--resume_from_checkpoint nowhere: there is no such folder. Name a checkpoint-<step> "
        "folder, or type auto for the newest in --output_dir.",
        "--push_to_hub: there is no Hugging Face token. Set HF_TOKEN, or type `hf auth login` once.",
        "--logging_nan_inf_filter True: must stay False, because NaN losses stop the run instead of being hidden; "
        "leave it out.",
        "--global_batch_size 20 is no multiple of world size 1 x --per_device_train_batch_size 8 = 8. What fits: "
        "--global_batch_size 16 or 24; or --per_device_train_batch_size 1, 2, 4, 5, 10, 20.",
        f"--train_file {job.path('trian.jsonl')}: no such file. Did you mean {job.path('train.jsonl')}?",
    ]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--global_batch_size", "0"], "--global_batch_size 0: expected at least 1 row."),
        (["--max_length", "513"], "--max_length 513: {model} has 512 positions; give --max_length 512 or less."),
        (["--save_strategy", "steps"], "--save_strategy steps and --eval_strategy epoch: "),
        (["--class_weights", "none.json"], "--class_weights none.json: cannot be read: "),
        (["--model_name_or_path", "{no_tokenizer}"], "--model_name_or_path {no_tokenizer}: its tokenizer has"),
        (["--attn_implementation", "spda"], "--attn_implementation spda: {model} cannot be read with it. "),
        (["--optim", "sgd", "--optim_args", "momentum"], "--optim sgd --optim_args momentum: cannot be made ("),
        (["--lr_scheduler_type", "warmup_stable_decay"], "--lr_scheduler_type warmup_stable_decay: cannot be made ("),
    ],
    ids=["flag", "model", "evaluations", "weights", "tokenizer", "attention", "optimizer", "schedule"],
)
def test_a_refused_run_reads_no_more_than_the_first_of_many_rows(job: Job, flags: list[str], problem: str) -> None:
    no_tokenizer = job.folder / "no_tokenizer"
    no_tokenizer.mkdir()
    shutil.copy(Path(job.flags["model_name_or_path"], "config.json"), no_tokenizer)
    job.write("train.jsonl", *GOOD * 5_001, ("ठीक", ""))
    (job.folder / "other.jsonl").write_text('{"tweet": "ठीक", "label": "positive"}\n', encoding="utf-8")
    words = [flag.format(no_tokenizer=no_tokenizer) for flag in flags]
    result = job.start(*words, "--validation_file", job.path("other.jsonl"))
    assert result.returncode == 2
    of_the_flag, of_the_file = re.findall(r"^  \d\. (.*)$", result.stderr, re.MULTILINE)
    assert of_the_flag.startswith(problem.format(model=job.flags["model_name_or_path"], no_tokenizer=no_tokenizer))
    assert "other.jsonl: no column text (--text_column)" in of_the_file
    assert "Of the rows only the first were read, for the run is refused in any case." in result.stderr


def test_flags_for_speed_that_cannot_work_are_told_together(job: Job) -> None:
    job.flags |= {"active_vocabulary": "on", "method": "lora", "padding_free": "on", "attn_implementation": "eager"}
    assert job.refused("--max_tokens_per_device", "0").problems == [
        "--active_vocabulary on: --method lora does not train the embedding. Leave one of them out.",
        "--padding_free on: --attn_implementation eager needs it. Leave it out, and rows are padded by length.",
        "--max_tokens_per_device 0: expected at least 1.",
    ]


def test_names_of_modules_are_told_with_what_else_does_not_fit_the_model(job: Job) -> None:
    job.flags |= {"method": "lora", "lora_target_modules": "qury", "max_length": "5000"}
    job.flags |= {"padding_free": "on", "attn_implementation": "eager", "push_to_hub": "true"}
    told = [problem.partition(":")[0] for problem in job.refused().problems]
    assert told == [
        *("--max_length 5000", "--push_to_hub", "--lora_target_modules qury", "--padding_free on"),
        "--push_to_hub",
    ]


def test_a_limit_of_tokens_below_the_longest_row_names_the_rows(job: Job) -> None:
    result = job.start("--max_tokens_per_device", "4")
    assert result.returncode == 2
    assert re.search(
        r"indictune: --max_tokens_per_device 4: 4 training rows are longer by themselves, up to 7 tokens: "
        r".*/train.jsonl:1, .*/train.jsonl:4\. Give --max_tokens_per_device 7 or more, or a smaller --max_length\.\n$",
        result.stderr,
    )


def test_what_a_limit_of_tokens_leads_to_is_checked_too(job: Job) -> None:
    result = job.start("--max_tokens_per_device", "8", "--ddp_static_graph", "true")
    assert result.returncode == 2
    assert "indictune: --ddp_static_graph true: torch fails with " in result.stderr


def test_broken_files_are_told_together_with_their_lines(job: Job) -> None:
    train, validation, test = (job.path(name) for name in ("t.csv", "v.jsonl", "e.csv"))
    Path(train).write_text("tweet,lable\nअच्छा,positive\n", encoding="utf-8")
    Path(validation).write_bytes(
        b'{"text": "ok", "label": "positive"}\n{"text": "ok", "label"\n{"text": "\xff", "label": "negative"}\n'
    )
    Path(test).write_bytes(b"")
    job.flags |= {"train_file": train, "validation_file": validation, "test_file": test}
    assert job.refused().problems == [
        f"--train_file {train}: no column text (--text_column); it has tweet, lable. Did you mean tweet?",
        f"--train_file {train}: no column label (--label_column); it has tweet, lable. Did you mean lable?",
        f"--validation_file {validation}:2: no valid JSON: Expecting ':' delimiter (column 23).",
        f"--validation_file {validation}:3: byte 0xff is no UTF-8 text; save the file as UTF-8.",
        f"--test_file {test}: the file is empty.",
    ]


def test_labels_are_checked_over_all_files(job: Job) -> None:
    job.write("one.jsonl", ("अच्छा", "positive"), ("ठीक", "positive"))
    job.flags["train_file"] = job.path("one.jsonl")
    train, validation = job.flags["train_file"], job.flags["validation_file"]
    assert job.refused().problems == [
        f"--train_file {train}: column label (--label_column) holds only the label positive; a classifier needs at "
        "least two labels.",
        f"--validation_file {validation}: label negative (2 rows, the first at {validation}:2) does not occur in the "
        "training rows; their labels are positive.",
    ]


def test_rows_without_any_text_are_told(job: Job) -> None:
    job.write("blank.jsonl", (" ", "positive"), ("\n", "negative"))
    job.flags["train_file"] = job.path("blank.jsonl")
    assert job.refused().problems == [
        f"--train_file {job.path('blank.jsonl')}: all 2 rows are empty in column text (--text_column)."
    ]


def test_a_label_column_of_free_text_in_a_folder_that_holds_another_run(job: Job, finished_run: FinishedRun) -> None:
    texts = [f"यह फिल्म नंबर {number} है" for number in range(6)]
    job.write("text.jsonl", *((text, text) for text in texts))
    job.flags |= {"train_file": job.path("text.jsonl"), "output_dir": str(finished_run.folder)}
    del job.flags["validation_file"]
    status = finished_run.folder / "status.json"
    ok, before = status.read_bytes(), hashes(finished_run.folder)
    try:
        problems = job.refused().problems
    finally:
        status.write_bytes(ok)
    assert problems == [
        f"--output_dir {finished_run.folder}: holds another run (metrics.json, train_log.jsonl, model.safetensors); "
        "choose another --output_dir, or go on with it by --resume_from_checkpoint auto.",
        f"--train_file {job.path('text.jsonl')}: column label (--label_column) looks like free text, not like labels: "
        '6 different values in 6 rows, such as "यह फिल्म नंबर 0 है", "यह फिल्म नंबर 1 है", "यह फिल्म नंबर 2 है". Name '
        "the column with the classes by --label_column.",
    ]
    assert hashes(finished_run.folder) == before


def test_when_a_run_saves_is_told_with_the_other_problems_and_before_any_token(job: Job, tmp_path: Path) -> None:
    flags = ("--save_strategy", "often", "--ddp_timeout", "0", "--logging_steps", "0", "--label_column", "lable")
    told = [problem.partition(":")[0] for problem in job.refused(*flags).problems]
    assert set(told) >= {"--save_strategy often", "--ddp_timeout 0", "--logging_steps 0"}
    assert len(told) == 5  # the column is missing in two files
    (problem,) = job.refused("--save_strategy", "steps").problems
    assert problem.startswith("--save_strategy steps and --eval_strategy epoch: ")
    del job.flags["validation_file"]
    (problem,) = job.refused("--early_stopping_patience", "3").problems
    assert problem == "--early_stopping_patience 3: needs validation rows (--validation_file)."
    (problem,) = job.refused("--lr_scheduler_type", "greedy").problems
    assert problem.startswith("--lr_scheduler_type greedy: needs validation rows (--validation_file); give some")


def test_resuming_a_finished_run_trains_nothing_and_changes_nothing(finished_run: FinishedRun) -> None:
    before = hashes(finished_run.folder)
    assert len(before) > 20
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(finished_run.folder)]
    result = start([*python(), SCRIPT, *flags, "--resume_from_checkpoint", "auto"])
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{finished_run.folder}: this run is finished; there is nothing to resume.\n"
    assert hashes(finished_run.folder) == before


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            ["--max_length", "513"],
            "--max_length 513: MODEL has 512 positions; give --max_length 512 or less.",
        ),
        (
            ["--class_weights", "balancd"],
            "--class_weights balancd: cannot be read: [Errno 2] No such file or directory: 'balancd'. Expected "
            "`balanced` or a JSON or YAML file of label: weight.",
        ),
        (
            ["--metric_for_best_model", "eval_macro_f1_or"],
            "--metric_for_best_model macro_f1_or: no row of VALIDATION has that language; expected macro_f1_hi or "
            "macro_f1_romanised.",
        ),
    ],
    ids=["max_length", "class_weights", "metric"],
)
def test_what_depends_on_model_or_labels_is_told_before_weights_are_read(
    job: Job, flags: list[str], problem: str
) -> None:
    result = job.start(*flags)
    assert result.returncode == 2
    told, _, message = result.stderr.partition("indictune: ")
    problem = problem.replace("MODEL", job.flags["model_name_or_path"])
    assert message == problem.replace("VALIDATION", job.flags["validation_file"]) + "\n"
    assert "Traceback" not in told
    assert json.loads((job.out / "status.json").read_text()) == {"state": "user_error", "message": message.rstrip()}
    check_free(job.out, None)  # the corrected command may have the same folder


def test_without_an_output_dir_the_message_stands_alone(job: Job, tmp_path: Path) -> None:
    del job.flags["output_dir"]
    result = job.start("--train_file=")
    assert result.returncode == 2
    assert "1. --output_dir is missing: name the folder that the model and logs go to." in result.stderr
    assert "Traceback" not in result.stderr


class TestUnderLaunchers:
    """The message comes from one rank, once, before the launcher's own lines."""

    def test_a_refused_run_says_once_that_it_has_not_read_the_rows(self, job: Job) -> None:
        job.write("train.jsonl", *GOOD * 5_001)
        result = job.start("--sed", "1", launcher=torchrun(2))
        assert result.stderr.count("Of the rows only the first were read") == 1
        assert "indictune: --sed: there is no such flag." in result.stderr

    def test_torchrun_with_a_deepspeed_file_that_contradicts_the_flags(self, job: Job) -> None:
        file = job.folder / "ds.json"
        file.write_text(
            json.dumps(
                {
                    "zero_optimization": {"stage": 2},
                    "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 3,
                    "bf16": {"enabled": True},
                }
            )
        )
        flags = ["--deepspeed", str(file), "--global_batch_size", "32", "--per_device_train_batch_size", "8"]
        way_out = 'Write "auto" in the file, or make them equal.'
        assert job.refused(*flags, "--bf17", launcher=torchrun(2)).problems == [
            "--bf17: there is no such flag. Did you mean `--bf16`?",
            "--deepspeed: the file says train_micro_batch_size_per_gpu = 4, and --per_device_train_batch_size is 8. "
            + way_out,
            f"--deepspeed: the file says bf16.enabled = True, and --bf16 is False. {way_out}",
            "--deepspeed: the file says gradient_accumulation_steps = 3, and the accumulation of --global_batch_size "
            f"is 2. {way_out}",
        ]

    def test_accelerate_that_was_asked_for_two_processes_and_starts_one(self, job: Job) -> None:
        refused = job.refused(launcher=accelerate("single_gpu", 2))
        assert refused.problems == [
            "accelerate launch was asked for more than one process and has started one: the config file has "
            "`distributed_type: NO`, or --cpu was given. Use accelerate_configs/ddp.yaml (it also runs on a CPU), or "
            "--num_processes 1."
        ]

    def test_accelerate_that_would_compile_without_the_recipes_knowledge(self, job: Job) -> None:
        launcher = accelerate("single_gpu", 1)
        launcher[2:2] = ["--dynamo_backend", "inductor"]
        of_the_flag, of_the_launcher = job.refused("--max_tokens_per_device", "0", launcher=launcher).problems
        assert of_the_flag == "--max_tokens_per_device 0: expected at least 1."
        assert of_the_launcher.startswith("accelerate's --dynamo_backend (dynamo_config in its file) is inductor:")
        assert of_the_launcher.endswith("give the script --torch_compile true --torch_compile_backend inductor.")

    @pytest.mark.slow
    def test_fsdp_whose_checkpoints_are_no_shards(self, job: Job) -> None:
        by_config = accelerate("fsdp2", 2)
        by_config[2:2] = ["--fsdp_state_dict_type", "FULL_STATE_DICT"]
        for launcher, flags, name in (
            (by_config, ["--sed", "1"], "fsdp_state_dict_type"),
            (torchrun(2), ["--fsdp", "full_shard"], "--fsdp"),  # whose default it is (transformers 5.23)
        ):
            told = job.refused(*flags, launcher=launcher).problems[-1]
            assert told.startswith(
                f"{name}: FSDP would save a FULL_STATE_DICT, from which no other launch could go on."
            )

    def test_the_deepspeed_launcher_passes_the_exit_code_on(self, job: Job) -> None:
        job.flags["train_file"] = job.path("missing.jsonl")
        result = job.start("--deepspeed", "ds_configs/zero9.json", launcher=deepspeed(2))
        assert result.returncode == 2
        status = json.loads((job.out / "status.json").read_text(encoding="utf-8"))
        assert status["state"] == "user_error"
        assert result.stderr.count("indictune: 2 problems:") == 1
        assert f"--train_file {job.flags['train_file']}: no such file." in status["message"]
        assert "--deepspeed ds_configs/zero9.json: cannot be read (No such file or directory)." in status["message"]
        assert "Traceback" not in result.stderr

    def test_plain_python_with_a_deepspeed_file(self, job: Job) -> None:
        assert job.refused("--deepspeed", "ds_configs/zero2.json").problems == [
            "--deepspeed ds_configs/zero2.json: plain python cannot start DeepSpeed. Start the script with "
            "`deepspeed --num_gpus 1`, `torchrun --nproc_per_node 1` or `accelerate launch`."
        ]
