"""`indictune distil`: train a small student to answer as a trained classifier does, and compare the two."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers.utils.logging import disable_progress_bar

from indictune.commands import until_stopped
from indictune.commands.dry_run import planned_run
from indictune.commands.export import GRAPH, PACKAGES, ExportFlags, GraphClassifier, export_model
from indictune.commands.predict import job_of
from indictune.commands.train import fit_data_ranks, read_asked, run_train
from indictune.config.command_line import to_words
from indictune.config.recipe import configuration_of, read_arguments
from indictune.config.shared_arguments import Checked, ClassifierArguments, TextFileArguments, flag
from indictune.console_text import printable, table
from indictune.data.bad_rows import BadRows
from indictune.data.load_rows import load_splits
from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import text_sources
from indictune.distributed.choose_launcher import choose_launcher
from indictune.errors import Problems, UserError, attributed_to, problem
from indictune.evaluation.comparison import compare_classifiers, verdict
from indictune.files import DISTILLED, content_digest, write_json
from indictune.hub.card import write_card
from indictune.models.atomic_folder import MODEL_FILES
from indictune.models.student import write_student
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction.input_parts import InputFiles
from indictune.prediction.labelled_parts import LabelledParts, label_input
from indictune.prediction.labelled_rows import cleaned_texts, text_file
from indictune.prediction.served_classifier import Classifier, ServedModel, load_served_classifier, served_model
from indictune.preflight.checks import preflight
from indictune.supervise.run_folder import check_folder, check_free
from indictune.versions import check_extra

_RECIPE = "recipes/sentiment/student.yaml"
_TEACHER, _STUDENT, _INT8 = "teacher", "student", "student, ONNX int8"
# Flags of the training that are the teacher's unless they are given, and those that the command sets itself.
_LAYOUT = ("text_column", "delimiter", "column_names", "quoting")
_OF_TEACHER = (
    *(*_LAYOUT, "validation_file", "test_file", "language_column", "label_column", "label_map"),
    *("keep_label_spellings", "bad_rows", "max_bad_fraction", "max_length", "long_text", "bf16", "fp16"),
)
_SET = ("model_name_or_path", "method", "dry_run", "soft_label_column", "dataset_name", "resume_from_checkpoint")
Flags = dict[str, list[str]]


@dataclass
class DistilFlags(Checked):
    """Which classifier is made small, and how small. The other flags are those of the student's training."""

    needed = ("model", "indictune distil RUN --train_file TEXTS --output_dir FOLDER")

    model: str = flag("", "The teacher: the folder of a finished run of a classifier. May be a bare first word.")
    layers: int | None = flag(None, "Layers of the student, evenly spaced among the teacher's. Default: half of them.")


def run_distil(flags: Mapping[str, list[str]]) -> int:
    """Label the texts, write the student, train it and compare it. What a killed command has done is kept."""
    import indictune.before_imports  # noqa: F401, before everything slow

    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    own = ["", *(each.name for each in fields(DistilFlags))]
    args = read_arguments({name: flags[name] for name in own if name in flags}, DistilFlags, "model")
    teacher, files, run, held_out = _checked(args, {name: flags[name] for name in flags if name not in own})
    student = next(iter(files)).with_name(_STUDENT)
    made = {"model_name_or_path": [str(student)], "train_file": [str(path) for path in files]}
    return (
        until_stopped(lambda: _prepare(args, teacher, files, student, run))
        or run_train(run | made | {"resume_from_checkpoint": ["auto"]})
        or until_stopped(lambda: _compare(teacher, Path(run["output_dir"][0]), held_out))
    )


def _checked(
    args: DistilFlags, typed: Flags
) -> tuple[ServedModel, dict[Path, InputFiles], Flags, dict[str, pa.Table]]:
    """The teacher, the texts by the file that gets their logits, the training's flags and the labelled rows by split.

    The files' folder is named by all that they are made of. Raises a `UserError` with all problems.
    """
    problems = Problems(problem("distil-sets", f"--{name}", " ".join(typed[name])) for name in _SET if name in typed)
    missing = [f"--{name}" for name in ("train_file", "output_dir") if not typed.get(name)]
    problems.extend(problem("argument-missing", name, usage=DistilFlags.needed[1]) for name in missing)
    problems.attempt(check_extra, "distil", "export", *PACKAGES)
    teacher = served_model(ClassifierArguments(model=args.model), problems)
    problems.raise_any()
    assert teacher is not None
    has_one_label = teacher.config.problem_type in (None, "single_label_classification")
    if not has_one_label or teacher.reading.text_pair_column or (Path(args.model) / ADAPTER_CONFIG).is_file():
        problems.append(problem("distil-teacher", "--model", args.model))
    if (args.layers or 1) > (most := teacher.config.num_hidden_layers):
        problems.append(problem("distil-too-many-layers", "--layers", args.layers, model=args.model, most=most))
    texts = problems.attempt(_texts, teacher, typed) or []
    run, held_out = problems.attempt(_training, args.model, teacher, typed, problems) or ({}, {})
    used = [path for name in MODEL_FILES for path in sorted(Path(args.model).glob(name))]
    used += [Path(each.file.path) for each in texts]
    read = {name: run.get(name) for name in (*_LAYOUT, "label_column", "language_column")}
    digest = hashlib.sha256(repr([args.layers, read, *map(content_digest, used)]).encode()).hexdigest()[:12]
    folder = Path(typed["output_dir"][0])
    problems.attempt(check_folder, folder)
    if not (work := folder / f"distil-{digest}").exists():
        problems.attempt(check_free, folder, None)
    problems.raise_any()
    return teacher, {work / f"texts-{number}.parquet": each for number, each in enumerate(texts, 1)}, run, held_out


def _texts(teacher: ServedModel, typed: Flags) -> list[InputFiles]:
    """The files of texts, each read once to its end."""
    found, layout = list[InputFiles](), {name: typed[name] for name in _LAYOUT if name in typed}
    with attributed_to("--train_file"):
        for path in files_named(typed["train_file"], "train")[1]:
            asked = read_arguments({"input_file": [path], **layout}, TextFileArguments, "model")
            found.append(InputFiles.of(replace(text_file(asked, teacher.reading), flag="--train_file"), BadRows(path)))
    return found


def _training(model: str, teacher: ServedModel, typed: Flags, problems: Problems) -> tuple[Flags, dict[str, pa.Table]]:
    """The flags of the student's training, which are checked on its teacher, and the labelled rows by split.

    Rows are read as in the teacher's training, unless a flag or a recipe says otherwise.
    """
    run = {"": ["sentiment"], "config": [_RECIPE], "soft_label_column": ["logits"], **typed}
    usual = {**configuration_of(Path(model)), **read_asked(run).content}
    run |= {name: to_words(usual[name]) for name in _OF_TEACHER if usual.get(name) not in (None, [])} | typed
    if "validation_file" not in run:
        raise UserError("distil-without-validation", "--validation_file", model=model)
    asked = read_asked({**run, "model_name_or_path": [model]})
    strategy = None if asked.launch.strategy == "auto" else asked.launch.strategy
    launcher = choose_launcher(strategy, asked.launch.num_processes)
    task, plan, found = planned_run(asked.task, fit_data_ranks(asked, launcher).words(), launcher.environment())
    problems.extend([*found, *preflight(plan, task)])
    sources = text_sources(plan.data, problems)
    sources.pop("train", None)
    rows = load_splits(plan.data, None, sources, known=teacher.labels).rows
    return run, {split: each.table for split, each in rows.items()}


def _prepare(args: DistilFlags, teacher: ServedModel, files: dict[Path, InputFiles], student: Path, run: Flags) -> int:
    """Label the texts and write the student, unless an earlier command has."""
    text, label, language = (run.get(f"{role}_column", [role])[0] for role in ("text", "label", "language"))

    def with_logits(classifier: Classifier, batch: pa.RecordBatch) -> pa.RecordBatch:
        cleaned = cleaned_texts(batch)
        logits = classifier.logits(cleaned["text"].to_pylist())
        columns = {text: cleaned["text"], label: pa.array([teacher.labels[at] for at in logits.argmax(1)])}
        columns |= {language: cleaned["language"], "logits": pa.array(list(logits), pa.list_(pa.float32()))}
        return pa.record_batch(columns).filter(pa.array(~np.isnan(logits).any(1)))  # not those without words

    classifier = None
    for path in (path for path in files if not path.exists()):
        classifier = classifier or Classifier(teacher)
        labelled = LabelledParts(str(path), job_of(files[path], teacher), "--output_dir")
        label_input(files[path], labelled, partial(with_logits, classifier))
    if not student.exists():
        used = [each for path in files for each in pq.read_table(path, columns=[text])[text].to_pylist()]
        shutil.rmtree(unfinished := student.with_name("unfinished"), ignore_errors=True)
        write_student(Path(args.model), unfinished, args.layers, teacher.tokenizer, used)
        unfinished.rename(student)
    return 0


def _compare(teacher: ServedModel, folder: Path, held_out: Mapping[str, pa.Table]) -> int:
    """Export the student in a folder, write `distil.json` and the card, and print the table."""
    if not (exported := folder / "onnx-int8").exists():
        shutil.rmtree(unfinished := folder / ".unfinished-export", ignore_errors=True)
        export_model(ExportFlags(str(folder), int8=True, output_dir=str(unfinished / exported.name)))
        (unfinished / exported.name).rename(exported)
    student = load_served_classifier(ClassifierArguments(model=str(folder)))
    served = student.served
    graph = GraphClassifier(exported / GRAPH, served.tokenizer, served.reading.max_length)
    models = {
        _TEACHER: (Path(teacher.args.model_name_or_path), teacher, Classifier(teacher).logits),
        _STUDENT: (folder, served, student.logits),
        _INT8: (exported, served, graph.logits),
    }
    found = _measured(models, held_out)
    write_json(folder / DISTILLED, found)
    write_card(folder)
    print(printable(found["table"]))
    return 0


def _measured(models: Mapping[str, tuple[Path, ServedModel, Any]], held_out: Mapping[str, pa.Table]) -> dict[str, Any]:
    """Size, speed and scores of models, given by name as folder, how it is served, and what computes logits."""
    rows, labels = held_out.values(), models[_TEACHER][1].labels
    texts, languages = ([each[name].to_pylist() for each in rows] for name in ("text", "language"))
    right = [np.array([labels.index(label) for label in each["label"].to_pylist()]) for each in rows]
    found, body, said, of_teacher = dict[str, Any](), list[list[str]](), list[str](), list[np.ndarray]()
    for name, (folder, served, logits) in models.items():
        logits(texts[0][:16])  # warms up
        began = time.perf_counter()
        guessed = [logits(some).argmax(1) for some in texts]
        speed = sum(map(len, texts)) / (time.perf_counter() - began)
        of_teacher = of_teacher or guessed
        scores = dict(zip(held_out, map(compare_classifiers, right, of_teacher, guessed, languages), strict=True))
        files = {path for pattern in (*MODEL_FILES, f"{GRAPH}*") for path in folder.glob(pattern)}
        size, config = sum(path.stat().st_size for path in files), served.config
        found[name] = {"layers": config.num_hidden_layers, "pieces": config.vocab_size, "bytes": size}
        found[name] |= {"rows_per_second": speed, "scores": {split: asdict(each) for split, each in scores.items()}}
        numbers = str(config.num_hidden_layers), f"{config.vocab_size:,}", f"{size / 1e6:,.1f}", f"{speed:,.0f}"
        body.append([name, *numbers, *(f"{each.overall.second:.4f}" for each in scores.values())])
        both = f"the {_TEACHER}", f"the {name}"
        said += [f"{split}: {verdict(each, both)}" for split, each in scores.items() if name != _TEACHER]
    header = ["", "layers", "pieces", "MB", "rows/s", *(f"macro-F1, {split} rows" for split in held_out)]
    return found | {"table": "\n".join([table(header, body), *said])}
