"""`indictune train` and `indictune recipes`: from an empty folder to a trained model."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from indictune.cli import main
from indictune.commands.train import before_labels, read_asked, with_defaults, with_enough_steps
from indictune.config.command_line import SCRIPTS, flags_of
from indictune.models import fetched
from indictune.versions import recipes, strategies
from tests.ranks.launching import ROOT, path, python, start
from tests.test_recipes import RECIPES

ROWS = "text,label\n" + "".join(f"बहुत अच्छी फिल्म {n},positive\nबेकार फिल्म {n},negative\n" for n in range(20))
ALIASES = tomllib.loads((ROOT / "indictune/config/aliases.toml").read_text(encoding="utf-8"))


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, but for a file of tweets."""
    (tmp_path / "tweets.csv").write_text(ROWS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Type `indictune ...` in a folder."""
    environment = {
        **os.environ,
        "PATH": path(),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [*python(), "-m", "indictune", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one message of a refused command."""
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


@pytest.mark.more
def test_a_file_is_enough(empty: Path) -> None:
    done = typed(
        empty, "train", "sentiment", "--train_file", "tweets.csv", "--max_steps", "2", "--validation_file=tweets.csv"
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((empty / "outputs/small_from_scratch/metrics.json").read_text())
    assert (metrics["strategy"], metrics["eval"]["num_examples"]) == ("single", 40)
    (line,) = re.findall(r"^  (accelerate launch .*)$", done.stderr, re.MULTILINE)
    words = shlex.split(line)
    assert Path(words[words.index("--config_file") + 1]).name == "single_gpu.yaml"
    assert "--validation_file" in words


def test_without_a_model_the_best_one_that_can_be_had_is_taken(
    empty: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the Hub, if it is reached or in its cache; else the fetched one; else the built-in one."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(empty / "cache"))
    words = ["train", "sentiment", "--train_file", "tweets.csv"]

    def taken() -> tuple[str, str]:
        asked = with_defaults(read_asked(words[1:]))
        named = asked.flags.get("model_name_or_path", [str(asked.content["model_name_or_path"])])
        assert asked.recipe is not None
        return asked.recipe.stem, named[0]

    assert taken() == ("small_from_scratch", "builtin:tiny-indic-bert")
    assert fetched.COMMAND in capsys.readouterr().err
    fetched.fetched_folder().mkdir(parents=True)
    (fetched.fetched_folder() / "config.json").write_text("{}")
    assert taken() == ("small_data", fetched.NAME)
    model = empty / "hub" / "models--ai4bharat--IndicBERTv2-MLM-only"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("1" * 40)
    (model / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("1" * 40) / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty / "hub"))
    assert taken() == ("small_data", fetched.NAME)  # its weights are missing
    (model / "snapshots" / ("1" * 40) / "pytorch_model.bin").write_bytes(b"weights")
    assert taken() == ("small_data", "ai4bharat/IndicBERTv2-MLM-only")


def test_without_a_recipe_a_small_file_gets_600_steps(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def added(*words: str) -> dict[str, Sequence[str]]:
        asked = read_asked(["sentiment", "--train_file", "tweets.csv", *words])
        more = with_enough_steps(asked).flags
        return {name: value for name, value in more.items() if name not in asked.flags}

    assert added() == {"min_steps": ["600"]}
    said = capsys.readouterr().err
    assert "at least 600 optimizer steps, fewer where validation rows show no gain." in said
    for flag in ("num_train_epochs", "max_steps", "min_steps"):
        assert added(f"--{flag}", "5") == {}
    assert capsys.readouterr().err == ""
    assert with_enough_steps(read_asked(["sentiment/demo.yaml"])).flags == {}  # a recipe says it
    assert "min_steps" not in with_enough_steps(read_asked(["ner"])).flags


@pytest.mark.slow
def test_several_processes_end_with_the_code_of_the_run_and_no_traceback(empty: Path) -> None:
    done = typed(empty, "train", "sentiment", "--train_file", "tweet.csv", "--num_processes", "2")
    assert done.returncode == 2
    assert "[no-such-file]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_strategy_that_names_a_file_of_deepspeed_works_anywhere(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "sentiment", "--train_file", "tweets.csv", "--strategy", "zero3", "--num_processes", "4"]
    assert main([*words, "--dry_run"]) == 0
    assert "zero3 on 4 process(es)" in capsys.readouterr().out


def test_a_dry_run_tells_what_becomes_of_a_strategy_file(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero_3 = {"zero_stage": 3, "zero3_save_16bit_model": False, "gradient_clipping": 0.5}
    content = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": zero_3}
    (empty / "theirs.yaml").write_text(json.dumps(content))
    words = ["train", "sentiment", "--train_file", "tweets.csv", "--strategy", "theirs.yaml", "--num_processes", "2"]
    assert main([*words, "--dry_run"]) == 0
    shown = capsys.readouterr()
    assert "--bf16 true --max_grad_norm 0.5" in shown.out
    assert "zero3_save_16bit_model false" in shown.err


def test_a_dry_run_prints_plan_tokens_and_memory_and_writes_nothing(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "sentiment", "--train_file", "tweets.csv", "--num_processes", "8", "--dry_run"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "ddp on 8 process(es)" in shown
    assert "64 rows = 8 x 8 rows x 1 accumulation step(s)" in shown  # the recipe has 16 rows a process
    assert re.search(r"^steps: +(\d+), about \1\.0 epoch", shown, re.MULTILINE)  # whose only step has 36 of 64 rows
    assert re.search(r"^train +36 .*\n^validation +4 ", shown, re.MULTILINE)
    assert re.search(r"^optimizer states +\d", shown, re.MULTILINE)
    assert sorted(path.name for path in empty.iterdir()) == ["tweets.csv"]


def test_a_dry_run_counts_the_rows_of_the_embedding_that_are_trained(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []
    for choice in ("on", "off"):
        words = ["train", "sentiment", "--train_file", "tweets.csv", "--active_vocabulary", choice, "--dry_run"]
        assert main(words) == 0
        found = re.search(r"([\d,]+) of ([\d,]+) parameters are trained", capsys.readouterr().out)
        assert found is not None
        trained.append(tuple(int(each.replace(",", "")) for each in found.groups()))
    (active, whole), off = trained
    assert active < whole
    assert off == (whole, whole)


@pytest.mark.more
def test_a_dry_run_has_an_embedding_row_for_each_learned_token(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More of them than the built-in model has."""
    words = map("".join, itertools.product("कखगघचछजझटठ", "तथदधनपफबभ", "यरलवशसहऱळम", "ािीुूेैोौ"))
    rows = [f"{word},{label}" for word in words for label in ("positive", "negative")]
    (empty / "tweets.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    flags = ["train", "sentiment", "--train_file", "tweets.csv", "--vocabulary_from_train", "9000"]
    assert main([*flags, "--dry_run"]) == 0
    found = re.search(r"([\d,]+) of ([\d,]+) parameters are trained", capsys.readouterr().out)
    assert found is not None


@pytest.mark.more
def test_a_dry_run_into_a_file_has_no_bars_and_no_words_of_libraries(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDICTUNE_CACHE", str(empty / "cache"))  # the built-in model is written anew
    done = typed(empty, "train", "sentiment", "--train_file", "tweets.csv", "--output_dir", "out", "--dry_run")
    assert done.stdout.startswith("task: ")
    assert "rows: 36 train, 4 validation" in done.stderr  # as `train` says it
    printed = done.stdout + done.stderr
    assert [word for word in ("\r", "%|", "WARNING", "it/s") if word in printed] == []


def test_a_dry_run_tells_all_problems(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train_file", "no.csv", "--max_length", "2", "--dry_run"]
    codes = re.findall(r"\[([\w-]+)\]$", refused(capsys, "train", "sentiment", *flags), re.MULTILINE)
    assert {"no-such-file", "expected-at-least"} <= set(codes)


@pytest.mark.parametrize(
    ("content", "words", "task"),
    [
        ("task: chat\n", [], "chat"),
        ("decided: {task: tokens}\n", [], "tokens"),
        ("packing: true\n", [], "chat"),
        ("class_weights: balanced\n", [], "classification"),
        ("seed: 1\n", ["sentiment"], "classification"),
        ("seed: 1\n", ["ner"], "tokens"),
        ("seed: 1\n", ["llama"], "chat"),
    ],
)
def test_the_task_is_that_of_the_recipe_or_the_word(empty: Path, content: str, words: list[str], task: str) -> None:
    (empty / "r.yaml").write_text(content)
    assert read_asked([*words, "--config", "r.yaml"]).task == task
    assert read_asked([*words, "r.yaml", "--seed", "2"]).task == task


def test_a_run_that_pretrains_reads_the_same_texts_of_the_same_model_first(empty: Path) -> None:
    words = ["--train_file", "a.csv", "b.csv", "--label_column", "y", "--seed", "3", "--num_processes", "2"]
    for name in ("a.csv", "b.csv"):
        (empty / name).touch()
    asked = read_asked(["sentiment/adapted.yaml", *words, "--output_dir", "out"])
    first = read_asked(before_labels(asked, asked.value("pretrain"), "out-pretrained"))
    assert (first.task, first.output_dir, first.launch.num_processes) == ("mlm", "out-pretrained", 2)
    assert first.recipe == recipes()["recipes/text/mlm_few_texts.yaml"]
    (empty / "out/checkpoint-8").mkdir(parents=True)
    named = read_asked(["sentiment/adapted.yaml", "--resume_from_checkpoint", "out/checkpoint-8"])
    assert before_labels(named, "r", "p")["resume_from_checkpoint"] == ["auto"]  # the other is of the second step
    assert first.flags == {
        "model_name_or_path": ["fetched:multilingual-e5-small"],
        "train_file": ["a.csv", "b.csv"],
        "seed": ["3"],
        "output_dir": ["out-pretrained"],
    }


@pytest.mark.more
def test_both_steps_run_and_a_script_refuses_to_leave_the_first_out(tmp_path: Path) -> None:
    (tmp_path / "mlm.yaml").write_text("task: mlm\nmax_steps: 2\neval_strategy: 'no'\nload_best_model_at_end: false\n")
    (tmp_path / "both.yaml").write_text(
        "task: classification\nmodel_name_or_path: builtin:tiny-indic-bert\ndataset_name: builtin:tweets\n"
        f"max_steps: 2\nreport: false\nbaseline: false\npretrain: {tmp_path / 'mlm.yaml'}\n"
    )
    out = tmp_path / "out"
    flags = [str(tmp_path / "both.yaml"), "--output_dir", str(out)]
    done = start([*python(), "-m", "indictune", "train", *flags])
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out-pretrained/metrics.json").read_text())["train"]
    trained = yaml.safe_load((out / "recipe.yaml").read_text(encoding="utf-8"))
    assert trained["model_name_or_path"] == str(tmp_path / "out-pretrained")
    refused = [*flags, "--output_dir", str(tmp_path / "other"), "--metric_for_best_model", "bleu"]
    assert start([*python(), "-m", "indictune", "train", *refused]).returncode == 2
    assert not (tmp_path / "other-pretrained").exists()
    goes_on = [*flags, "--resume_from_checkpoint", str(out / "checkpoint-2"), "--max_steps", "3"]
    resumed = start([*python(), "-m", "indictune", "train", *goes_on])
    assert "Resuming" in resumed.stderr, resumed.stderr
    again = start([*python(), "-m", "indictune", "train", *flags])
    assert (again.returncode, "[output-dir-holds-files]" in again.stderr) == (2, True)
    alone = start([*python(), "scripts/train_sentiment.py", "--config", *flags[:2], str(tmp_path / "alone")])
    assert (alone.returncode, "[pretrain-without-train]" in alone.stderr) == (2, True)


@pytest.mark.parametrize("name", [str(path.relative_to(ROOT)) for path in RECIPES])
def test_every_installed_recipe_is_found_by_name(empty: Path, name: str) -> None:
    asked = read_asked([name.removeprefix("recipes/"), "--dataset_name", "builtin:tweets"])  # its files are not here
    assert f"\ntask: {asked.task}\n" in recipes()[name].read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([], "train-what"),
        (["no.yaml"], "no-such-recipe"),
        (["sentiment", "tweets.csv"], "recipe-is-rows"),
        (["seed.yaml"], "task-missing"),
        (["other.yaml"], "no-such-name"),
        (["llama", "demo.yaml"], "recipe-of-other-task"),
        (["sentiment", "--strategy", "ddq"], "no-such-strategy"),
        (["sentiment", "--num_processes", "0"], "expected-at-least"),
        (["sentiment", "--deepspeed", "ds_configs/zero2.json"], "deepspeed-of-launcher"),
        (["sentiment", "--lerning_rate", "1"], "unknown-name"),
        (["sentiment", "ner"], "bare-word"),
        (["list.yaml"], "recipe-not-a-mapping"),
        (["broken.yaml"], "not-yaml"),
        (["typo.yaml"], "unknown-name"),
    ],
)
def test_what_cannot_be_started_is_refused(
    empty: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    (empty / "seed.yaml").write_text("seed: 1\n")
    (empty / "other.yaml").write_text("task: rl\n")
    (empty / "demo.yaml").write_text("task: classification\n")
    (empty / "list.yaml").write_text("- 1\n")
    (empty / "broken.yaml").write_text("a: [\n")
    (empty / "typo.yaml").write_text("task: chat\nmax_lenght: 9\n")
    assert refused(capsys, "train", *words).endswith(f"[{code}]\n")
    assert not (empty / "outputs").exists()


def test_a_strategy_of_several_machines_names_the_line_for_each(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (empty / "nodes.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 16\n")
    words = ["sentiment", "--train_file", "tweets.csv", "--output_dir", "out", "--strategy", "nodes.yaml"]
    for more in ([], ["--dry_run"]):
        message = refused(capsys, "train", *words, *more)
        assert message.endswith("[several-machines]\n")
        launch = "accelerate launch --config_file nodes.yaml --main_process_ip HOST_OF_RANK_0 --machine_rank 0 "
        assert launch in message
        assert "train_sentiment.py" in message
        assert "--train_file tweets.csv" in message


def test_a_script_refuses_the_recipe_of_another_task(empty: Path) -> None:
    recipe = str(recipes()["recipes/llama/demo.yaml"])
    done = start([*python(), "scripts/train_sentiment.py", "--config", recipe, "--output_dir", str(empty / "out")])
    assert done.returncode == 2
    assert "scripts/train_llama.py" in done.stderr
    assert done.stderr.endswith("[recipe-of-other-task]\n")


@pytest.mark.parametrize(
    ("verb", "meant"),
    [
        ("sft", "train llama"),
        ("finetune", "train"),
        ("eval", "evaluate"),
        ("tokenize", "prepare"),
        ("init", "recipes"),
        ("webui", "demo"),
        ("quantize", "merge ... --to_4bit true"),
    ],
)
def test_a_verb_of_another_toolkit_names_ours(capsys: pytest.CaptureFixture[str], verb: str, meant: str) -> None:
    assert f"`indictune {meant}`" in refused(capsys, verb, "config.yaml")


def test_a_name_of_another_toolkit_names_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(ALIASES) >= 60
    for name, entry in ALIASES.items():
        here, note = (entry, "") if isinstance(entry, str) else entry
        tasks = [task for task in SCRIPTS if not here or here in flags_of(task)]
        assert tasks, f"no task has {here}"
        assert all(name not in flags_of(task) for task in SCRIPTS)
        message = refused(capsys, "train", tasks[0], f"--{name}", "1")
        assert f"`--{here}`" in message or not here
        assert note in message
        assert message.endswith("[unknown-name]\n")


def test_flags_of_other_tools_are_answered_by_what_was_meant(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_chat = {"gradient_clipping": "`--max_grad_norm`", "eos_token": "`--chat_template`", "batch": "`--global_batch"}
    for name, meant in of_chat.items():
        assert meant in refused(capsys, "train", "llama", f"--{name}", "1")
    message = refused(capsys, "train", "llama", "--dataset_text_field", "text")
    assert "It is `--text_column` of " in message
    assert "scripts/train_clm.py" in message
    assert "The task decides the loss" in refused(capsys, "train", "llama", "--loss_type", "nll")
    assert "--strategy zero3" in refused(capsys, "train", "llama", "--deepspeed", "ds.json")
    words = ["train", "sentiment", "--train_file", "tweets.csv", "--strategy"]
    assert "Did you mean --strategy fsdp2?" in refused(capsys, *words, "fsdp")
    assert "Use one of 3d, ddp" in refused(capsys, *words, "quick")


def test_a_name_that_resembles_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "`--" not in refused(capsys, "train", "sentiment", "--rope_scaling", "2").replace("`--help`", "")


def test_a_flag_of_another_task_names_its_script() -> None:
    from indictune.config.recipe import read_recipe
    from indictune.tasks.classification import Classification

    (problem,) = read_recipe(["--packing", "true"], Classification.arguments).problems
    assert problem.code == "unknown-name"
    assert "scripts/train_llama.py" in str(problem)


def test_help_shows_the_flags_that_matter_then_all_then_those_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    def names(*words: str) -> list[str]:
        assert main(["train", *words]) == 0
        return re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE)

    first = names("--help")
    own = ["convert", "dry_run", "engine", "num_processes", "num_workers", "ray_address", "strategy"]
    assert first[:7] == own
    assert len(first[7:]) == 15
    assert {"config", "learning_rate", "train_file"} <= set(first)
    assert set(names("--help", "all")) >= {*flags_of("classification"), "config"}
    assert {"lora_r", "lora_alpha", "method"} <= set(names("llama", "--help", "lora"))
    assert "learning_rate" not in names("--help", "lora")


def test_a_script_answers_help_before_the_libraries_are_imported(empty: Path) -> None:
    command = [*python(), "-X", "importtime", str(ROOT / "scripts/train_llama.py"), "--seed", "1", "--help", "lora"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--lora_alpha" in done.stdout
    assert "| indictune.config.command_line" in done.stderr.replace("  ", "")
    assert re.search(r"\| +(torch|transformers)$", done.stderr, re.MULTILINE) is None


def test_a_script_finds_typing_errors_before_the_libraries_are_imported(empty: Path) -> None:
    (empty / "torch.py").write_text("raise SystemExit('torch is imported')\n", encoding="utf-8")
    script = [*python(), str(ROOT / "scripts/train_sentiment.py"), "--lerning_rate", "1", "--lora_rank", "8"]
    (empty / "typo.yaml").write_text("max_lenght: 9\nseed: 1\nlogging_steps: null\n")
    script += ["--config", "typo.yaml"]
    done = subprocess.run(
        script,
        cwd=empty,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{empty}:{ROOT}"},
    )
    assert done.returncode == 2
    assert re.findall(r"(?:--|typo.yaml: )(\w+): .* `(?:--)?(\w+)`", done.stderr) == [
        ("lerning_rate", "learning_rate"),
        ("lora_rank", "lora_r"),
        ("max_lenght", "max_length"),
    ]


@pytest.mark.parametrize("verb", ["prepare", "inspect"])
def test_a_verb_finds_typing_errors_of_a_recipe_before_the_libraries_are_imported(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    for module in ("prepare", "inspect"):
        monkeypatch.setitem(sys.modules, f"indictune.commands.{module}", None)
    (empty / "typo.yaml").write_text("task: chat\nmax_lenght: 9\n")
    assert refused(capsys, verb, "--config", "typo.yaml").startswith("indictune: typo.yaml: max_lenght: ")


def test_recipes_are_listed_and_copied(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name.removeprefix("recipes/") in listed for name in recipes())
    assert all(f"{name}.yaml" in listed for name in strategies())
    assert "scripts/slurm/train.sbatch" not in listed
    assert "  slurm/train.sbatch " in listed
    assert main(["recipes", "sentiment/demo", "zero3.yaml", "train.sbatch", "jobset.yaml", "--to", "mine"]) == 0
    capsys.readouterr()
    copied = sorted(str(path.relative_to(empty / "mine")) for path in (empty / "mine").rglob("*.*"))
    strategy = ["accelerate_configs/zero3.yaml", "ds_configs/zero3.json"]
    scripts = ["scripts/kubernetes/jobset.yaml", "scripts/slurm/train.sbatch"]
    assert copied == [*strategy, "recipes/sentiment/demo.yaml", *scripts]
    assert refused(capsys, "recipes", "sentiment/demo", "--to", "mine").endswith("[file-exists]\n")
    assert refused(capsys, "recipes", "demo").endswith("[shipped-file-unknown]\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"indictune \d+\.\d+\.\d+\n", capsys.readouterr().out)
