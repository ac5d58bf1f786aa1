"""A trained classifier made small, by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from indictune.commands.distil import DistilFlags, _checked, run_distil
from indictune.commands.export import GraphClassifier
from indictune.errors import UserError
from indictune.files import write_yaml
from indictune.models.builtin import sample_rows
from indictune.prediction.labelled_rows import label_texts
from tests.commands.random_models import LABELS, of_pairs, random_classifier
from tests.conftest import FinishedRun
from tests.first_hour.saved_models import saved_classifier
from tests.ranks.launching import python, start
from tests.refusals import refused

TEXTS = [str(row["text"]) for row in sample_rows("train.jsonl")[100:160]]


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    folder = random_classifier(tmp_path / "teacher", "bert")
    rows = [{"text": text, "label": LABELS[at % 3]} for at, text in enumerate(TEXTS[:9])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    write_yaml(folder / "recipe.yaml", {"max_length": 60, "validation_file": str(tmp_path / "rows.jsonl")})
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:3]), encoding="utf-8")
    return folder


def flags_of(teacher: Path, **more: Any) -> dict[str, list[str]]:
    given = {"": teacher, "train_file": teacher.parent / "texts.txt", "output_dir": teacher.parent / "out", **more}
    return {name: [str(value)] for name, value in given.items()}


@pytest.mark.parametrize(
    ("code", "flag", "more"),
    [
        ("distil-too-many-layers", "--layers", {"layers": 3}),
        ("no-such-file", "--train_file", {"train_file": "missing.txt"}),
        ("distil-sets", "--method", {"method": "lora"}),
        ("distil-sets", "--dry_run", {"dry_run": "true"}),
        ("no-effect", "--label_smoothing_factor", {"label_smoothing_factor": 0.1}),
        ("no-such-file", "--validation_file", {"validation_file": "missing.csv"}),
        ("expected-at-least", "--soft_label_temperature", {"soft_label_temperature": 0.5}),
        ("expected-at-least", "--layers", {"layers": 0}),
        ("unknown-name", "--learning_rat", {"learning_rat": 1}),
    ],
)
def test_flags_are_refused_before_anything_is_written(
    teacher: Path, code: str, flag: str, more: dict[str, Any]
) -> None:
    with refused(code, flag=flag):
        run_distil(flags_of(teacher, **more))
    assert not (teacher.parent / "out").exists()


def test_texts_of_another_column_are_labelled_anew(teacher: Path) -> None:
    (teacher.parent / "texts.csv").write_text("one,two\nthree,four\n", encoding="utf-8")
    made = set()
    for names in ("text other", "other text"):
        flags = flags_of(teacher, train_file=teacher.parent / "texts.csv") | {"column_names": names.split()}
        made.add(next(iter(_checked(DistilFlags(flags.pop("")[0]), flags)[1])))
    assert len(made) == 2


def test_all_problems_come_at_once(teacher: Path) -> None:
    out = teacher.parent / "out"
    out.mkdir()
    (out / "metrics.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError) as error:
        run_distil(flags_of(teacher, layers=7, train_file="missing.txt", validation_file="missing.csv"))
    found = [(each.code, each.flag) for each in error.value.problems]
    expected = [("distil-too-many-layers", "--layers"), ("no-such-file", "--train_file")]
    expected.append(("no-such-file", "--validation_file"))
    assert found == [*expected, ("output-dir-holds-files", "--output_dir")]


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_a_teacher_gives_one_label_to_a_text(teacher: Path, tmp_path: Path, problem_type: str) -> None:
    other = saved_classifier(tmp_path / "other", problem_type)
    with refused("distil-teacher", flag="--model"):
        run_distil(flags_of(teacher) | {"": [str(other)]})


def test_a_teacher_of_pairs_an_adapter_or_an_unfinished_run_is_refused(teacher: Path, tmp_path: Path) -> None:
    with refused("distil-teacher"):
        run_distil(flags_of(teacher) | {"": [str(of_pairs(random_classifier(tmp_path / "pairs", "bert")))]})
    adapter = saved_classifier(tmp_path / "adapter", method="lora")
    with refused("distil-teacher", "indictune merge"):
        run_distil(flags_of(teacher) | {"": [str(adapter)]})
    (teacher / "train_log.jsonl").write_text("", encoding="utf-8")
    with refused("run-not-finished", flag="--model"):
        run_distil(flags_of(teacher))


def test_a_teacher_without_labelled_rows_needs_some(teacher: Path) -> None:
    write_yaml(teacher / "recipe.yaml", {"max_length": 60})
    with refused("distil-without-validation", flag="--validation_file"):
        run_distil(flags_of(teacher))


@pytest.fixture(scope="module")
def distilled(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers one, on 60 texts in two files of different kinds."""
    folder = tmp_path_factory.mktemp("distilled")
    (folder / "texts.txt").write_text("\n".join([*TEXTS[:40], " "]), encoding="utf-8")
    rows = [json.dumps({"text": text, "other": 1}) for text in TEXTS[40:]]
    (folder / "more.jsonl").write_text("\n".join(rows), encoding="utf-8")
    distil(finished_run, folder)
    return folder / "out"


def distil(teacher: FinishedRun, folder: Path) -> str:
    flags = [
        "--train_file",
        str(folder / "texts.txt"),
        str(folder / "more.jsonl"),
        "--output_dir",
        str(folder / "out"),
    ]
    flags += ["--layers", "1", "--num_train_epochs", "2", "--learning_rate", "1e-3", "--report", "false"]
    flags += ["--global_batch_size", "16", "--per_device_train_batch_size", "16"]
    done = start([*python(), "indictune/__main__.py", "distil", str(teacher.folder), *flags])
    assert done.returncode == 0, done.stderr
    return done.stdout


def found_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "distil.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.more
def test_the_teachers_logits_are_kept(distilled: Path, finished_run: FinishedRun) -> None:
    tables = [pq.read_table(each).to_pylist() for each in sorted(distilled.glob("distil-*/texts-*.parquet"))]
    rows = [row for each in tables for row in each]
    assert len(rows) == 60
    scores = label_texts(finished_run.folder, [row["text"] for row in rows])
    for row, expected in zip(rows, scores, strict=True):
        assert row["label"] == expected["label"]
        powers = np.exp(np.array(row["logits"]) - max(row["logits"]))
        np.testing.assert_allclose(powers / powers.sum(), list(expected["scores"].values()), atol=1e-5)


@pytest.mark.more
def test_the_table_has_teacher_student_and_its_8_bit_graph(distilled: Path, finished_run: FinishedRun) -> None:
    found = found_in(distilled)
    teacher, student, in_8_bit = (found[name] for name in ("teacher", "student", "student, ONNX int8"))
    assert [each["layers"] for each in (teacher, student, in_8_bit)] == [2, 1, 1]
    assert student["pieces"] == in_8_bit["pieces"] < teacher["pieces"]
    assert in_8_bit["bytes"] < student["bytes"] < teacher["bytes"]
    assert min(each["rows_per_second"] for each in (teacher, student, in_8_bit)) > 0
    counts = {split: scores["overall"]["num_examples"] for split, scores in in_8_bit["scores"].items()}
    assert counts == {"validation": 13, "test": 11}
    of_run = [json.loads((each / "metrics.json").read_text("utf-8")) for each in (finished_run.folder, distilled)]
    for split, block in (("validation", "eval"), ("test", "test")):
        compared = student["scores"][split]["overall"]
        expected = [metrics[block]["macro_f1"] for metrics in of_run]
        assert [compared["first"], compared["second"]] == pytest.approx(expected, abs=1e-6)
        assert in_8_bit["scores"][split]["overall"]["first"] == compared["first"]
        assert teacher["scores"][split]["overall"]["difference"]["value"] == 0
    card = ModelCard.load(distilled / "README.md").text
    assert found["table"] in card


@pytest.mark.more
def test_the_student_serves_as_any_model(distilled: Path) -> None:
    """In plain transformers, by `predict`, and in 8 bit."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(distilled).eval()
    tokenizer = AutoTokenizer.from_pretrained(distilled)
    batch = tokenizer(TEXTS, truncation=True, padding=True, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**batch).logits.numpy()
    predicted = [row["label"] for row in label_texts(distilled, TEXTS)]
    assert [model.config.id2label[at] for at in logits.argmax(1)] == predicted
    by_graph = GraphClassifier(distilled / "onnx-int8/model.onnx", tokenizer, 32).logits(TEXTS)
    assert np.abs(by_graph - logits).max() < 0.2
    assert (by_graph.argmax(1) == logits.argmax(1)).mean() > 0.8


@pytest.mark.slow
def test_the_same_command_ends_what_was_not_done_and_keeps_the_rest(
    distilled: Path, finished_run: FinishedRun
) -> None:
    weights, before = (distilled / "model.safetensors").read_bytes(), found_in(distilled)
    shutil.rmtree(distilled / "onnx-int8")
    (distilled / ".unfinished-export/.onnx-int8.unfinished").mkdir(parents=True)  # of a killed command
    shown = distil(finished_run, distilled.parent)
    assert "student, ONNX int8" in shown
    assert (distilled / "model.safetensors").read_bytes() == weights
    after = found_in(distilled)
    assert [after[name]["scores"] for name in before if name != "table"] == [
        before[name]["scores"] for name in before if name != "table"
    ]
    flags = {"": finished_run.folder, "train_file": distilled.parent / "texts.txt", "output_dir": distilled}
    with refused("output-dir-holds-files", flag="--output_dir"):
        run_distil({name: [str(value)] for name, value in flags.items()})
