"""Every task gives the same run under every family of strategies."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import pipeline

from indictune.config.arguments import ModelArguments
from indictune.evaluation.breakdown import read_breakdowns
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier
from indictune.report.report_page import write_report
from tests.ranks.conftest import starter
from tests.ranks.launching import Run, accelerate, python, start
from tests.ranks.test_evaluation import numbers
from tests.ranks.test_parity import OF_METRICS, differences

JOB = """
dropout: 0
max_length: 48
global_batch_size: 24
per_device_train_batch_size: 6
per_device_eval_batch_size: 8
max_steps: 7
learning_rate: 1e-3
lr_scheduler_type: constant_with_warmup
warmup_steps: 1
logging_steps: 1
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: steps
save_steps: 1
save_total_limit: 20
"""

ENTITIES = {"B-PER": ["राम", "Sita", "கண்ணன்", "Priya"], "B-LOC": ["दिल्ली", "Chennai", "మధుర", "Hyderabad"]}


def sentences(rows: int, seed: int) -> str:
    """CoNLL: a person goes to a place, in 3 to 7 words."""
    rng, found = random.Random(seed), []
    for _ in range(rows):
        person, place = (rng.choice(words) for words in ENTITIES.values())
        filler = [f"{word} O" for word in rng.sample(["went", "to", "the", "big", "city"], rng.randint(1, 5))]
        found.append([f"{person} B-PER", *filler, f"{place} B-LOC"])
    return "\n\n".join("\n".join(sentence) for sentence in found) + "\n"


def write_tokens(folder: Path) -> str:
    for name, rows in (("train", 101), ("validation", 53)):
        (folder / f"{name}.conll").write_text(sentences(rows, rows), encoding="utf-8")
    return "".join(f"{name}_file: {json.dumps(str(folder / f'{name}.conll'))}\n" for name in ("train", "validation"))


WORDS = ["good", "अच्छा", "great", "bad", "बुरा", "மோசம்", "film", "food", "day"]


def words(rng: random.Random) -> list[str]:
    return [rng.choice(WORDS) for _ in range(rng.randint(2, 9))]


def score_of(words: list[str]) -> float:
    return round(5 * sum(word in WORDS[:3] for word in words) / len(words), 1)


def labels_of(words: list[str]) -> list[str]:
    """Most texts are long, few are short, and some are of a film."""
    given = {"long": len(words) > 3, "short": len(words) < 3, "film": "film" in words}
    return [label for label, is_given in given.items() if is_given]


def write_texts(problem_type: str, label_of: Callable[[list[str]], object]) -> Callable[[Path], str]:
    """Writes jsonl files of two splits, and the part of a recipe that names them."""

    def write(folder: Path) -> str:
        rng = random.Random(0)
        for name, rows in (("train", 101), ("validation", 53)):
            texts = [words(rng) for _ in range(rows)]
            lines = [json.dumps({"text": " ".join(each), "label": label_of(each)}) for each in texts]
            (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        files = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "validation")}
        entries = {"problem_type": problem_type, **files}
        return "".join(f"{name}: {json.dumps(value)}\n" for name, value in entries.items())

    return write


def write_pairs(folder: Path) -> str:
    """Pairs with a label that only both texts together give: whether the second one has words of the first."""
    rng = random.Random(0)
    for name, rows in (("train", 101), ("validation", 53)):
        pairs = [(words(rng), words(rng)) for _ in range(rows)]
        label = {True: "P", False: "NP"}
        lines = [
            json.dumps({"a": " ".join(one), "b": " ".join(other), "label": label[one[0] in other]})
            for one, other in pairs
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = {f"{name}_file": str(folder / f"{name}.jsonl") for name in ("train", "validation")}
    entries = {"text_column": "a", "text_pair_column": "b", **files}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in entries.items())


SOFT_LABELS = ["good", "short", "film"]


def write_soft_labels(folder: Path) -> str:
    """Texts with the logits of a teacher, which come from their words, and a classifier that learns them."""
    rng, args = random.Random(0), ModelArguments()
    tokenizer = load_tokenizer(args)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        load_classifier(args, SOFT_LABELS, tokenizer).save_pretrained(str(folder / "model"))
    tokenizer.save_pretrained(folder / "model")
    for name, rows in (("train", 101), ("validation", 53)):
        texts = [words(rng) for _ in range(rows)]
        logits = [[score_of(each) - 2, 0.1 * len(each), 2.0 * ("film" in each) - 0.5] for each in texts]
        labels = [SOFT_LABELS[max(range(3), key=each.__getitem__)] for each in logits]
        table = pa.table({"text": [" ".join(each) for each in texts], "label": labels, "logits": logits})
        pq.write_table(table, folder / f"{name}.parquet")
    files = {f"{name}_file": str(folder / f"{name}.parquet") for name in ("train", "validation")}
    entries = {"model_name_or_path": str(folder / "model"), "soft_label_column": "logits", **files}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in entries.items())


def write_documents(folder: Path) -> str:
    """Texts of 2 to 9 words, and a few of 80, which are cut; packed, they are 24 rows and not a multiple of it."""
    rng = random.Random(0)
    for name, rows in (("train", 601), ("validation", 53)):
        texts = [words(rng) if number % 50 else [rng.choice(WORDS) for _ in range(80)] for number in range(rows)]
        (folder / f"{name}.txt").write_text("\n\n".join(map(" ".join, texts)) + "\n", encoding="utf-8")
    return "".join(f"{name}_file: {json.dumps(str(folder / f'{name}.txt'))}\n" for name in ("train", "validation"))


def write_for_llama(folder: Path) -> str:
    return write_documents(folder) + "bf16: false\ngradient_checkpointing: false\n"


SAMPLES = "num_sample_generations: 2\nmax_new_tokens: 4\n"


def write_answer_pairs(folder: Path, marked: bool = False, more: str = SAMPLES) -> str:
    """Pairs of answers of 2 to 9 words, of which the better one is good; 101 rows make a ragged last global batch.

    With `marked`, each row has one of both. `more` is of the recipe.
    """
    rng = random.Random(0)
    for name, rows in (("train", 101), ("validation", 53)):
        lines = []
        for number in range(rows):
            prompt = " ".join(words(rng))
            good, bad = (f" {' '.join(words(rng))} {last}" for last in ("good", "bad"))
            is_good = number % 3 > 0
            rated = {"completion": good if is_good else bad, "label": is_good}
            lines.append(json.dumps({"prompt": prompt} | (rated if marked else {"chosen": good, "rejected": bad})))
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    files = "".join(f"{name}_file: {json.dumps(str(folder / f'{name}.jsonl'))}\n" for name in ("train", "validation"))
    return files + more + "bf16: false\ngradient_checkpointing: false\n"


SENTIMENT = "scripts/train_sentiment.py"
TASKS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "tokens": ("scripts/train_tokens.py", write_tokens),
    "regression": (SENTIMENT, write_texts("regression", score_of)),
    "multi_label": (SENTIMENT, write_texts("multi_label_classification", labels_of)),
    "pairs": (SENTIMENT, write_pairs),
    "soft_labels": (SENTIMENT, write_soft_labels),
    "mlm": ("scripts/train_mlm.py", write_documents),
    "clm": ("scripts/train_clm.py", write_for_llama),
    "dpo": ("scripts/train_preferences.py", write_answer_pairs),
    "kto": ("scripts/train_kto.py", partial(write_answer_pairs, marked=True)),
    "reward": ("scripts/train_reward.py", partial(write_answer_pairs, more="")),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., Run]]:
    found = {}
    for name, (script, write) in TASKS.items():
        folder = tmp_path_factory.mktemp(name)
        job = JOB.replace("tiny-indic-bert", "tiny-indic-llama") if name == "clm" else JOB
        (folder / "job.yaml").write_text(job + write(folder), encoding="utf-8")
        found[name] = starter(folder / "job.yaml", tmp_path_factory, script)
    return found


@pytest.mark.parametrize(
    ("name", "strategy", "ranks"),
    [
        pytest.param("tokens", "ddp", 2, marks=pytest.mark.slow),
        pytest.param("pairs", "single", 1, marks=pytest.mark.more),
        pytest.param("reward", "single", 1, marks=pytest.mark.more),
        *(pytest.param(name, "single", 1, marks=pytest.mark.slow) for name in ("regression", "multi_label")),
    ],
)
def test_the_evaluate_command_gives_the_numbers_of_the_run(
    runs: dict[str, Callable[..., Run]], tmp_path: Path, name: str, strategy: str, ranks: int
) -> None:
    trained = runs[name]("single", 1, "--per_device_train_batch_size", "24")
    validation = yaml.safe_load((trained.folder / "recipe.yaml").read_text(encoding="utf-8"))["validation_file"]
    launcher = python() if strategy == "single" else accelerate(strategy, ranks)
    flags = ["--model", str(trained.folder), "--test_file", validation, "--output_dir", str(tmp_path / "out")]
    result = start([*launcher, "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 0, result.stderr
    evaluated = Run(tmp_path / "out").metrics
    assert evaluated["world_size"] == ranks
    assert numbers(evaluated["test"]) == pytest.approx(numbers(trained.metrics["eval"]), abs=1e-6)
    found, of_run = (read_breakdowns(folder) for folder in (tmp_path / "out", trained.folder))
    for language, group in found["test"].by["language"].items():
        assert group.num_examples == evaluated["test"]["per_language"][language]["num_examples"]
        value = group.scores[found["test"].score].value
        assert value == pytest.approx(evaluated["test"]["per_language"][language][found["test"].score], abs=1e-6)
        assert value == pytest.approx(
            of_run["eval"].by["language"][language].scores[found["test"].score].value, abs=1e-6
        )
    lines, of_run_lines = (lines_of(folder) for folder in (tmp_path / "out", trained.folder))
    assert [line["number"] for line in lines] == list(range(53))
    for line, of_run_line in zip(lines, of_run_lines, strict=True):
        assert {key: line.get(key) for key in SAME} == {key: of_run_line.get(key) for key in SAME}
        if name == "reward":
            assert line["reward_margin"] == pytest.approx(of_run_line["reward_margin"], abs=1e-5)
        elif name != "regression":
            assert line["predicted"] == of_run_line["predicted"]


@pytest.mark.more
def test_a_run_on_pairs_says_so_and_shows_both_texts(runs: dict[str, Callable[..., Run]]) -> None:
    folder = runs["pairs"]("single", 1, "--per_device_train_batch_size", "24").folder
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["text_reading"] == {"text_column": "a", "text_pair_column": "b"}
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["model_input_names"]
    assert "token_type_ids" in names
    (mistakes,) = json.loads((folder / "mistakes.json").read_text(encoding="utf-8")).values()
    validation = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["validation_file"]
    rows = [json.loads(line) for line in Path(validation).read_text(encoding="utf-8").splitlines()]
    page = write_report([folder], folder / "shown.html").read_text(encoding="utf-8")
    assert mistakes
    for each in mistakes:
        row = rows[each["number"]]
        assert each["text"] == f"{row['a']}\n{row['b']}"
        assert each["text"] in page
    baseline = json.loads((folder / "baseline.json").read_text(encoding="utf-8"))
    assert (baseline["train_rows"], baseline["rows"]) == (101, 53)


SAME = ("id", "row", "language", "script", "length", "label")


def lines_of(folder: Path, name: str = "predictions.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


# The slow tests try all pairs.
MORE = {("regression", "ddp"), ("multi_label", "fsdp2"), ("soft_labels", "ddp")}
MORE |= {("pairs", "zero3"), ("mlm", "fsdp2"), ("clm", "zero3"), ("dpo", "ddp"), ("dpo", "fsdp2")}
MORE |= {("kto", "fsdp2"), ("reward", "ddp")}
PAIRS = [(name, strategy) for name in TASKS for strategy in ("ddp", "fsdp2", "pipeline", "zero3")]
PAIRS.remove(("mlm", "pipeline"))  # which is refused


@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(*pair, marks=pytest.mark.more if pair in MORE else pytest.mark.slow) for pair in PAIRS],
)
def test_two_ranks_train_the_model_of_one_process(
    runs: dict[str, Callable[..., Run]], name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = runs[name]("single", 1, "--per_device_train_batch_size", "24")
    if name in ("dpo", "kto"):  # each strategy measures the reference itself
        monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    two = runs[name](strategy, 2)
    assert len(one.log) == 7
    assert one.log[-1]["loss"] < one.log[0]["loss"]
    assert (two.metrics["strategy"], two.metrics["world_size"]) == (strategy, 2)
    # A correlation of numbers that differ little, such as those of a model after 7 steps, magnifies their rounding.
    # A perplexity of thousands is the exponential of a loss, which is compared below.
    of_metrics = {"regression": 1e-4, "mlm": 1e-2, "clm": 1e-2, "dpo": 1e-5, "kto": 1e-5, "reward": 1e-5}.get(
        name, OF_METRICS
    )
    found = differences(one, two, of_metrics)
    if strategy == "zero3" and name in (
        "mlm",
        "clm",
    ):  # torch rounds norms of large gradients
        assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=3e-4)
        found = [each for each in found if not each.startswith("grad_norm")]
    assert found == []
    if name in ("dpo", "kto"):
        one_sample, two_sample = (lines_of(each.folder, "samples.jsonl")[0] for each in (one, two))
        assert one_sample == two_sample
        assert one_sample["answer_before"] != one_sample["answer"]
        assert two.metrics["answer_lengths"] == one.metrics["answer_lengths"]
    assert two.metrics["eval"]["loss"] == pytest.approx(one.metrics["eval"]["loss"], abs=1e-5)
    for language, scores in one.metrics["eval"]["per_language"].items():
        of_few_rows = 100 * of_metrics if name == "regression" else of_metrics  # two ranks of ten may swap
        assert two.metrics["eval"]["per_language"][language] == pytest.approx(scores, abs=of_few_rows)


@pytest.mark.more
def test_transformers_alone_computes_the_rewards_of_a_saved_model(runs: dict[str, Callable[..., Run]]) -> None:
    folder = runs["reward"]("single", 1, "--per_device_train_batch_size", "24").folder
    validation = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))["validation_file"]
    rows = [json.loads(line) for line in Path(validation).read_text(encoding="utf-8").splitlines()]
    refused = start([*python(), "indictune/__main__.py", "predict", str(folder), "--text", "good"])
    assert refused.returncode == 2
    assert "[model-rates-conversations]" in refused.stderr
    classify: Any = pipeline("text-classification", str(folder))
    for row, line in zip(rows[:5], lines_of(folder), strict=False):
        chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]
        text = classify.tokenizer.apply_chat_template(chat, tokenize=False)
        (found,) = classify(text, add_special_tokens=False, function_to_apply="none")
        assert found["score"] == pytest.approx(line["chosen_reward"], abs=1e-5)


def assert_resumes_to_the_bit(whole: Run, name: str, folder: Path, environ: dict[str, str] | None = None) -> Path:
    """Resume a copy of a run from its third step, in the folder, which is returned."""
    shutil.copytree(whole.folder, folder)
    for each in (*folder.glob("checkpoint-[4567]"), *folder.glob("*.safetensors"), folder / "metrics.json"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    flags = ["--config", str(folder / "recipe.yaml"), "--output_dir", str(folder), "--resume_from_checkpoint", "auto"]
    result = start([*python(), TASKS[name][0], *flags], environ)
    assert result.returncode == 0, result.stderr
    resumed = Run(folder)
    assert [entry["loss"] for entry in resumed.log[-4:]] == [entry["loss"] for entry in whole.log[-4:]]
    assert (folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert resumed.metrics["eval"] == whole.metrics["eval"]
    return folder


@pytest.mark.more
@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_raw_text_resumes_to_the_bit_and_evaluates_alike(
    runs: dict[str, Callable[..., Run]], tmp_path: Path, name: str
) -> None:
    """Step 5 ends the first epoch: masks are drawn anew, and those of the first one again."""
    whole = runs[name]("single", 1, "--per_device_train_batch_size", "24")
    folder = assert_resumes_to_the_bit(whole, name, tmp_path / "out")
    validation = yaml.safe_load((whole.folder / "recipe.yaml").read_text(encoding="utf-8"))["validation_file"]
    flags = ["--model", str(folder), "--test_file", validation, "--output_dir", str(tmp_path / "evaluated")]
    result = start([*python(), "indictune/__main__.py", "evaluate", *flags])
    assert result.returncode == 0, result.stderr
    evaluated = Run(tmp_path / "evaluated").metrics["test"]
    assert numbers(evaluated) == pytest.approx(numbers(whole.metrics["eval"]), rel=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param("dpo", marks=pytest.mark.more), pytest.param("kto", marks=pytest.mark.slow)]
)
def test_answers_resume_to_the_bit_also_without_the_cached_reference(
    runs: dict[str, Callable[..., Run]], tmp_path: Path, name: str
) -> None:
    """The reference is measured again by the model before training, and not by that of the checkpoint."""
    whole = runs[name]("single", 1, "--per_device_train_batch_size", "24")
    assert_resumes_to_the_bit(whole, name, tmp_path / "out", {"INDICTUNE_CACHE": str(tmp_path / "cache")})
    assert list((tmp_path / "cache").glob("prepared/reference-*"))


@pytest.mark.more
def test_a_pretrained_encoder_is_a_start_for_a_classifier_and_an_adapter_learns_raw_text(
    runs: dict[str, Callable[..., Run]], tmp_path: Path
) -> None:
    pretrained = runs["mlm"]("single", 1, "--per_device_train_batch_size", "24")
    few = ["--max_steps", "1", "--eval_strategy", "no", "--load_best_model_at_end", "false", "--learning_rate", "0"]
    flags = ["--model_name_or_path", str(pretrained.folder), "--dataset_name", "builtin:tweets", *few]
    result = start([*python(), SENTIMENT, *flags, "--output_dir", str(tmp_path / "classifier")])
    assert result.returncode == 0, result.stderr
    began, given = Run(tmp_path / "classifier").weights, pretrained.weights
    of_encoder = [name for name in began if name in given and "encoder" in name]
    assert len(of_encoder) > 10
    assert all(torch.equal(began[name], given[name]) for name in of_encoder)
    assert torch.equal(*(each["bert.embeddings.word_embeddings.weight"] for each in (began, given)))
    lora = ["--dataset_name", "builtin:tweets", "--method", "lora", "--learning_rate", "1e-2", "--bf16", "false"]
    few = [
        "--max_steps",
        "12",
        "--logging_steps",
        "1",
        "--global_batch_size",
        "4",
        "--per_device_train_batch_size",
        "4",
    ]
    result = start([*python(), TASKS["clm"][0], *lora, *few, "--output_dir", str(tmp_path / "adapter")])
    assert result.returncode == 0, result.stderr
    adapter = Run(tmp_path / "adapter")
    assert adapter.log[-1]["loss"] < adapter.log[0]["loss"]
    assert (tmp_path / "adapter/adapter_config.json").is_file()
