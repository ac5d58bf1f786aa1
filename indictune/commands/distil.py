"""`indictune distil`: train a small student to answer as a trained classifier does, and compare the two."""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from indictune.commands import until_stopped
from indictune.commands.dry_run import planned_run
from indictune.commands.export import GRAPH, PACKAGES, ExportFlags, GraphClassifier, export_model
from indictune.commands.predict import InputFile, label_file
from indictune.commands.train import fit_data_ranks, read_asked, run_train
from indictune.config.arguments import DataArguments
from indictune.config.command_line import to_words
from indictune.config.plan import unresolved
from indictune.config.recipe import configuration_of, read_arguments
from indictune.config.shared_arguments import Checked, ClassifierArguments, TextFileArguments, flag
from indictune.console_text import printable, table
from indictune.data.bad_rows import BadRows
from indictune.data.cache import Column, content_digest
from indictune.data.load_rows import load_splits
from indictune.data.read.open_files import files_named
from indictune.data.read.row_sources import text_sources
from indictune.distributed.choose_launcher import choose_launcher
from indictune.errors import Problem, Problems, UserError, attributed_to, problem
from indictune.evaluation.comparison import compare, verdict
from indictune.evaluation.scorers import one_label
from indictune.files import DISTILLED, json_or_nothing, write_json, write_once
from indictune.hub.card import write_card
from indictune.models.atomic_folder import MODEL_FILES
from indictune.models.load import load_trained, stored_quantisation
from indictune.models.student import layer_numbers, used_vocabulary, write_student
from indictune.models.trusted_files import ADAPTER_CONFIG, own_classes
from indictune.prediction.labelled_rows import cleaned_texts, text_file
from indictune.prediction.served_classifier import Classifier, ServedModel, load_served_classifier, served_model
from indictune.preflight.checks import preflight
from indictune.supervise.run_folder import check_folder, check_free
from indictune.versions import check_extra

logger = logging.getLogger(__name__)

WORK = "distil"  # in --output_dir: the texts with the teacher's logits, and the student before its training
_SOFT = "logits"
_TEACHER, _STUDENT, _INT8, _EXPORTED = "teacher", "student", "student, ONNX int8", "onnx-int8"
_TIMED_TEXTS, _ROUNDS = 256, 5
Logits = Callable[[list[str]], np.ndarray]
# Flags of the training that are the teacher's unless they are given, and those that nobody else sets.
_LAYOUT = ("text_column", "delimiter", "column_names", "quoting")
_FILES = ("validation_file", "test_file")
_OF_TEACHER = (
    *(*_FILES, *_LAYOUT, "language_column", "label_column", "label_map", "keep_label_spellings"),
    *("bad_rows", "max_bad_fraction", "max_length", "long_text", "bf16", "fp16", "drop_leaked_rows"),
)
_SET = (
    *("model_name_or_path", "model_revision", "method", "vocabulary_from_train", "trust_remote_code", "dry_run"),
    *("soft_label_column", "problem_type", "dataset_name", "train_files", "text_pair_column"),
    "resume_from_checkpoint",
)


@dataclass
class DistilFlags(Checked):
    """Which classifier is made small, and how small. The other flags are those of the student's training."""

    needed = ("model", "indictune distil RUN --train_file TEXTS --output_dir FOLDER")

    model: str = flag(
        "", "The teacher: the --output_dir of a finished run of a classifier. May be given as a bare first word."
    )
    layers: int | None = flag(None, "Layers of the student, evenly spaced among the teacher's. Default: half of them.")
    vocabulary: Literal["used", "all"] = flag(
        "used", "`used`: the student has the pieces that the texts of --train_file use, and single characters."
    )


def run_distil(flags: Mapping[str, list[str]]) -> int:
    """Label the texts, write the student, train it and compare it. What a killed command has done is kept."""
    import indictune.before_imports  # noqa: F401, before everything slow

    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    made: list[Any] = []  # the teacher, and the flags of the student's training

    def prepare() -> int:
        args, teacher, texts, run = _checked(flags)
        made.extend((teacher, run | _prepared(args, teacher, texts, run)))
        return 0

    code = until_stopped(prepare) or run_train(made[1])
    return code or until_stopped(lambda: compare_with_teacher(made[0], Path(made[1]["output_dir"][0])))


def _checked(flags: Mapping[str, list[str]]) -> tuple[DistilFlags, ServedModel, list[InputFile], dict[str, list[str]]]:
    """The flags of the command, the teacher, the texts, and the training's flags; a `UserError` has all problems."""
    own = ["", *(each.name for each in fields(DistilFlags))]
    args = read_arguments({name: flags[name] for name in own if name in flags}, DistilFlags, "model")
    run = {name: words for name, words in flags.items() if name not in own}
    problems = Problems(problem("distil-sets", f"--{name}", " ".join(run[name])) for name in _SET if name in run)
    missing = [f"--{name}" for name in ("train_file", "output_dir") if not run.get(name)]
    problems.extend(problem("argument-missing", name, usage=DistilFlags.needed[1]) for name in missing)
    problems.attempt(check_extra, "distil", "export", *PACKAGES)
    teacher = served_model(ClassifierArguments(model=args.model), problems)
    problems.raise_any()
    assert teacher is not None
    problems.extend(_unfit(teacher))
    if (args.layers or 1) > (most := teacher.config.num_hidden_layers):
        problems.append(problem("distil-too-many-layers", "--layers", args.layers, model=args.model, most=most))
    texts = _texts(teacher, run, problems)
    with problems.collecting():
        run |= _flags_of_training(args.model, teacher, run, problems)
    problems.raise_any()
    return args, teacher, texts, run


def _unfit(teacher: ServedModel) -> Iterator[Problem]:
    """Why a classifier is no teacher."""
    folder, config = Path(teacher.args.model_name_or_path), teacher.config
    merge = f"Merge it first: indictune merge {folder} --output_dir FOLDER --dtype float32"
    if config.problem_type not in (None, "single_label_classification"):
        yield problem("distil-teacher", "--model", folder, found=f"--problem_type {config.problem_type}")
    if teacher.reading.text_pair_column is not None or own_classes(config):
        yield problem("distil-teacher", "--model", folder, found="pairs of texts, or code of its own")
    if (folder / ADAPTER_CONFIG).is_file() or stored_quantisation(config):
        yield problem("distil-teacher", "--model", folder, merge, found="an adapter, or weights in 4 bit")


def _texts(teacher: ServedModel, run: Mapping[str, list[str]], problems: Problems) -> list[InputFile]:
    """The files of texts, each read once to its end."""
    found, layout = list[InputFile](), {name: run[name] for name in _LAYOUT if name in run}
    with problems.collecting(), attributed_to("--train_file"):
        for file in files_named(run["train_file"], "train")[1]:
            with problems.collecting(), attributed_to("--train_file"):
                asked = read_arguments({"input_file": [file], **layout}, TextFileArguments, "model")
                read = InputFile.of(replace(text_file(asked, teacher.reading), flag="--train_file"), BadRows(file))
                if not any((text or "").strip() for batch in read.windows() for text in batch["text"].to_pylist()):
                    raise UserError("no-texts", value=file, rows=read.rows, column=read.file.wanted.required["text"])
                found.append(read)
    return found


def _flags_of_training(
    model: str, teacher: ServedModel, run: Mapping[str, list[str]], problems: Problems
) -> dict[str, list[str]]:
    """More flags of the student's training; all are checked on its teacher, which is no smaller.

    Texts and labelled rows are read as in the teacher's training, unless a flag or a recipe says otherwise.
    """
    check_folder(output_dir := Path(run["output_dir"][0]))
    if not (output_dir / WORK).exists():
        check_free(output_dir, None)
    fixed = {"": ["sentiment"], "problem_type": ["single_label_classification"], "soft_label_column": [_SOFT]}
    asked = read_asked({**run, **fixed, "model_name_or_path": [model]})
    usual = {"text_column": "text", "label_column": "label", "drop_leaked_rows": True}
    given = {**usual, **configuration_of(Path(model)), **asked.content}
    names = [name for name in _OF_TEACHER if given.get(name) not in (None, []) and name not in run]
    if {*_FILES} & run.keys():
        names = [name for name in names if name not in _FILES]
    made = {name: to_words(given[name]) for name in names} | fixed
    if "validation_file" not in {**run, **made}:
        raise UserError("distil-without-validation", "--validation_file", model=model)
    asked = replace(asked, flags={name: words for name, words in {**asked.flags, **made}.items() if name})
    strategy = None if asked.launch.strategy == "auto" else asked.launch.strategy
    launcher = choose_launcher(strategy, asked.launch.num_processes)
    task, plan, found = planned_run(asked.task, fit_data_ranks(asked, launcher).words(), launcher.environment())
    problems.extend([*found, *preflight(plan, task)])
    problems.attempt(held_out_rows, plan.data, teacher.labels)
    return made


def _prepared(
    args: DistilFlags, teacher: ServedModel, texts: Sequence[InputFile], run: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    """Label the texts and write the student, unless an earlier command has; returns flags that name both.

    Their names have digests of what they are made of.
    """
    folder, output_dir = Path(args.model), Path(run["output_dir"][0])
    weights = [content_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    digests = [_digest(weights, content_digest(each.file.path)) for each in texts]
    files = [output_dir / WORK / f"texts-{digest}.parquet" for digest in digests]
    depth = teacher.config.num_hidden_layers
    layers = layer_numbers(depth, args.layers or (depth + 1) // 2)
    student = output_dir / WORK / f"student-{_digest(digests, layers, args.vocabulary)}"
    if Path(configuration_of(output_dir).get("model_name_or_path", student)).name != student.name:
        raise UserError("distil-of-another", "--output_dir", output_dir)
    student.parent.mkdir(parents=True, exist_ok=True)
    classifier = None
    for source, path in zip(texts, files, strict=True):
        if not path.exists():
            classifier = classifier or Classifier(teacher)
            try:
                label_file(source, classifier, path, partial(_with_logits, run))
            except UserError as error:  # of the disk, or of another command that writes there
                raise UserError(problems=[replace(each, flag="--output_dir") for each in error.problems]) from error
    tokenizer, kept = teacher.tokenizer, None
    if args.vocabulary == "used" and not student.exists():
        column = run["text_column"][0]
        read = pa.concat_tables([pq.read_table(file, columns=[column]) for file in files])[column]
        if (found := used_vocabulary(tokenizer, teacher.config, Column(read))) is not None:
            tokenizer, kept = found
        else:
            logger.warning("The tokenizer is not of WordPiece or Unigram, so the student has the whole vocabulary.")
    write_once(student, lambda path: write_student(folder, path, layers, tokenizer, kept))
    named = {"model_name_or_path": [str(student)], "train_file": [str(file) for file in files]}
    return {**named, "resume_from_checkpoint": ["auto"]}


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _with_logits(flags: Mapping[str, list[str]], teacher: Classifier, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The cleaned texts that have words, with the teacher's label and its logits, in the columns that are read."""
    cleaned = cleaned_texts(batch)
    logits = teacher.logits(cleaned["text"].to_pylist())
    labels = np.array(teacher.served.labels, dtype=object)[logits.argmax(1)]
    columns: dict[str, Any] = {"text": cleaned["text"], "label": pa.array(labels, pa.string())}
    columns["language"] = cleaned["language"]
    named = {flags.get(f"{role}_column", [role])[0]: each for role, each in columns.items()}
    made = pa.record_batch({**named, _SOFT: pa.array(list(logits), pa.list_(pa.float32()))})
    return made.filter(pa.array(~np.isnan(logits).any(1)))


def held_out_rows(data: DataArguments, labels: Sequence[str]) -> dict[str, pa.Table]:
    """The labelled rows of `validation` and `test`; a `UserError` if they have other labels than these."""
    problems = Problems()
    sources = text_sources(data, problems)
    problems.raise_any()
    sources.pop("train", None)
    return {split: each.table for split, each in load_splits(data, None, sources, known=labels).rows.items()}


def compare_with_teacher(teacher: ServedModel, folder: Path) -> int:
    """Export the student in a folder, compare, and write `distil.json` and the card, unless they are there."""
    if not (found := json_or_nothing(folder / DISTILLED)):
        exported = folder / _EXPORTED
        write_once(exported, lambda path: export_model(ExportFlags(str(folder), int8=True, output_dir=str(path))))
        student = load_served_classifier(ClassifierArguments(model=str(folder)))
        limit, tokenizer = student.served.reading.max_length, AutoTokenizer.from_pretrained(exported)
        graph = GraphClassifier(exported / GRAPH, tokenizer, limit)
        held_out = held_out_rows(unresolved(DataArguments, configuration_of(folder)), teacher.labels)
        models = {_TEACHER: Classifier(teacher).logits, _STUDENT: student.logits, _INT8: graph.logits}
        folders = {_TEACHER: Path(teacher.args.model_name_or_path), _STUDENT: folder, _INT8: exported}
        found = _sizes(folders, {_TEACHER: teacher, _STUDENT: student.served}, held_out["validation"])
        found["rows_per_second"] = _rows_per_second(models, held_out["validation"]["text"].to_pylist()[:_TIMED_TEXTS])
        found["scores"] = {split: _scores(models, rows, teacher.labels) for split, rows in held_out.items()}
        write_json(folder / DISTILLED, found | {"table": _shown(found)})
        write_card(folder)
    print(printable(_shown(found)))
    return 0


def _sizes(folders: Mapping[str, Path], both: Mapping[str, ServedModel], rows: pa.Table) -> dict[str, Any]:
    """Layers, pieces, share of unknown tokens in rows, parameters, and bytes of all files that a model needs."""
    texts, names = rows["text"].to_pylist(), (*MODEL_FILES, f"{GRAPH}*")
    files = {name: {path for each in names for path in folder.glob(each)} for name, folder in folders.items()}
    counts = {name: load_trained(folders[name], device_map="cpu").num_parameters() for name in both}
    return {
        "layers": {name: each.config.num_hidden_layers for name, each in both.items()},
        "pieces": {name: len(each.tokenizer) for name, each in both.items()},
        "unknown_tokens": {name: _unknown_share(each.tokenizer, texts) for name, each in both.items()},
        "parameters": counts | {_INT8: counts[_STUDENT]},
        "bytes": {name: sum(path.stat().st_size for path in of_model) for name, of_model in files.items()},
    }


def _rows_per_second(models: Mapping[str, Logits], texts: list[str]) -> dict[str, float]:
    """The median of several rounds, in which the models take turns: another program disturbs all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(1 + _ROUNDS):  # the first one warms up
        for name, logits in models.items():
            began = time.perf_counter()
            logits(texts)
            seconds[name].append(time.perf_counter() - began)
    return {name: len(texts) / statistics.median(each[1:]) for name, each in seconds.items()}


def _unknown_share(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """The share of tokens that stand for what the tokenizer does not know."""
    rows: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return float(np.mean([each == tokenizer.unk_token_id for row in rows for each in row]))


def _scores(models: Mapping[str, Logits], rows: pa.Table, labels: Sequence[str]) -> dict[str, Any]:
    """The scores of each model on labelled rows, and how the others differ from the teacher."""
    texts, languages = rows["text"].to_pylist(), rows["language"].to_pylist()
    right = np.array([labels.index(label) for label in rows["label"].to_pylist()])
    guessed = {name: logits(texts).argmax(1) for name, logits in models.items()}
    found: dict[str, Any] = {}
    for name, guess in guessed.items():
        scores = one_label(right, guess, labels)(np.arange(len(right))).scores
        found[name] = {"rows": len(right), **{each: asdict(scores[each]) for each in ("macro_f1", "accuracy")}}
        compared = compare(right, guessed[_TEACHER], guess, languages)
        said = verdict(compared, (f"the {_TEACHER}", f"the {name}")).partition("\n")[0]
        if name != _TEACHER:
            found[name] |= {"against_teacher": asdict(compared), "verdict": said}
    return found


def _shown(found: Mapping[str, Any]) -> str:
    """The table, and whether the student is worse by more than chance."""
    sizes, speeds, scores = found["bytes"], found["rows_per_second"], found["scores"]
    lines = [f"{what}: {found[what][_STUDENT]:,} of {found[what][_TEACHER]:,}" for what in ("layers", "pieces")]
    unknown = " and ".join(f"{share:.2%} of the {name}'s" for name, share in found["unknown_tokens"].items())
    lines.append(f"unknown tokens of the validation rows: {unknown}")
    header = ["", "parameters", "MB", "rows/s", *(f"macro-F1, {split} rows" for split in scores)]
    body = []
    for name, count in found["parameters"].items():
        size = f"{sizes[name] / 1e6:,.1f} ({sizes[name] / sizes[_TEACHER]:.1%})"
        speed = f"{speeds[name]:,.0f} ({speeds[name] / speeds[_TEACHER]:.1f} x)"
        f1 = ("{value:.4f} ({low:.4f} to {high:.4f})".format(**each[name]["macro_f1"]) for each in scores.values())
        body.append([name, f"{count:,}", size, speed, *f1])
    lines.append(table(header, body))
    lines += [f"{split}: {each[name]['verdict']}" for split, each in scores.items() for name in (_STUDENT, _INT8)]
    return "\n".join(lines)
