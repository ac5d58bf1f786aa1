"""Tiny datasets in the layout of published ones: names of files, columns, splits, oddities.

Layouts were read on 2026-11-28 in the public listings and viewers of the repositories, and in programs that read them.
What nobody could see there is a guess: that IndicSentiment has no converted files, and the column `interactions`. All
texts are invented.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Features, List, Value

from tests.hub_layouts.shelf import CONVERTED, Files, Repository, Shelf
from tests.hub_layouts.tiny import PAGE

LANGUAGES = ("as", "bd", "bn", "gu", "hi", "kn", "ml", "mr", "or", "pa", "ta", "te", "ur")
SCRIPT = b"import datasets\n\nraise SystemExit('nobody runs this')\n"
NLI = ["entailment", "neutral", "contradiction"]
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]
ROWS = 12  # of a split


@dataclass(frozen=True)
class Published:
    """A set in the table of `docs/datasets.md`.

    Attributes:
        quirk: what is unusual about its layout.
        command: what `indictune train` gets, as users type it.
        repository: that the rows come from.
    """

    quirk: str
    command: tuple[str, ...]
    repository: str


def parquet(rows: Sequence[Mapping[str, Any]], features: Features | None = None) -> bytes:
    """A parquet file, as `datasets` writes it if there are features."""
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), features and features.arrow_schema), file)
    return file.getvalue()


def card(configs: Mapping[str, Mapping[str, str]]) -> bytes:
    """A README.md that names the files of each split of each configuration."""
    lines = ["---", "configs:"]
    for name, splits in configs.items():
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [line for split, path in splits.items() for line in (f"  - split: {split}", f"    path: {path}")]
    return "\n".join([*lines, "---", "# Rows", ""]).encode()


def indic_sentiment() -> Files:
    """A script, and json files of two splits; some rows have no label."""
    files = {"README.md": PAGE, "IndicSentiment.py": SCRIPT}
    for split, language in product(("validation", "test"), LANGUAGES):
        rows: list[dict[str, Any]] = [
            {"GENERIC CATEGORIES": "Hobbies", "CATEGORY": "Toys", "SUB-CATEGORY": "Kites", "PRODUCT": "kite"}
            | {"BRAND": "none", "ASPECTS": "price", "ASPECT COMBO": "price", "ENGLISH REVIEW": f"Kite {n}"}
            | {"LABEL": (None, "Positive", "Negative")[n and n % 2 + 1], "INDIC REVIEW": f"पतंग {n} {len(files)}"}
            for n in range(ROWS)
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        files[f"data/{split}/{language}.json"] = lines.encode()
    return files


def indic_sentiment_translated() -> Files:
    """Parquet files of two splits, neither of them `train`."""
    files = {"README.md": PAGE}
    for split in ("test", "validation"):
        labels = [("Positive", "Negative")[n % 2] for n in range(ROWS)]
        rows = [{"INDIC REVIEW": f"पतंग {n} {len(split)}", "LABEL": label} for n, label in enumerate(labels)]
        files[f"data/{split}-00000-of-00001.parquet"] = parquet(rows)
    return files


def indic_instruct() -> Files:
    """Eight configurations whose splits are languages. `nmt-seed` is in the folder `nmt`, and has only Hindi."""
    folders = {name: name for name in ("anudesh", "dolly", "flan_v2", "hh-rlhf", "lm_sys", "oasst1", "wikihow")}
    folders["nmt-seed"] = "nmt"
    files, configs = dict[str, bytes](), dict[str, dict[str, str]]()
    for config, folder in sorted(folders.items()):
        splits = ["hi"] if config == "nmt-seed" else ["en", "hi"]
        configs[config] = {split: f"{folder}/{split}-*" for split in splits}
        for split in splits:
            rows = [_instruction(config, f"{config} {split} {n}") for n in range(ROWS)]
            files[f"{folder}/{split}-00000-of-00001.parquet"] = parquet(rows)
    return {"README.md": card(configs), **files}


def _instruction(config: str, text: str) -> dict[str, Any]:
    if config == "dolly":
        return {"id": text, "instruction": f"गिनो {text}", "context": "", "response": f"एक {text}"}
    if config == "flan_v2":
        return {"id": text, "inputs": f"गिनो {text}", "targets": f"एक {text}"}
    if config == "nmt-seed":
        languages = {"input_language": "en", "output_language": "hi"}
        return {"id": text, "input_text": f"Count {text}", "output_text": f"गिनो {text}", **languages}
    return {"id": text, "messages": [_said("user", f"गिनो {text}"), _said("assistant", f"एक {text}")]}


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def indicxnli() -> tuple[Files, Files]:
    """A script and json files; and what the Hub made of them, in a folder for each language and split."""
    features = Features({"premise": Value("string"), "hypothesis": Value("string"), "label": ClassLabel(names=NLI)})
    main = {"README.md": PAGE, "indicxnli.py": SCRIPT}
    converted = dict[str, bytes]()
    for language, split in product(("as", "hi", "ta"), ("train", "test", "validation")):
        rows = [
            {"premise": f"राम {language} {split} {n} गाता है", "hypothesis": f"राम {n} चुप है", "label": n % 3}
            for n in range(3 * ROWS)
        ]
        folder = "dev" if split == "validation" else split
        main[f"forward/{folder}/xnli_{language}.json"] = json.dumps(rows, ensure_ascii=False).encode()
        converted[f"{language}/{split}/0000.parquet"] = parquet(rows, features)
    return main, converted


def naamapadam() -> tuple[Files, Files]:
    """A script and packed files; and what the Hub made of them, of some languages."""
    features = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=TAGS))})
    main = {"README.md": PAGE, "naamapadam.py": SCRIPT, "data/hi_IndicNER_v1.0.zip": b"PK\5\6" + bytes(18)}
    converted = dict[str, bytes]()
    for language, split in product(("hi", "gu"), ("train", "test", "validation")):
        rows = [
            {"tokens": ["सीता", language, split, str(n), "दिल्ली"], "ner_tags": [1, 0, 0, 0, 5]} for n in range(ROWS)
        ]
        converted[f"{language}/{split}/0000.parquet"] = parquet(rows, features)
    return main, converted


def marathi_nlp() -> Files:
    """L3Cube's repository on GitHub: csv files with line feeds in cells, text files without blank lines."""
    files = {"README.md": PAGE}
    for split in ("train", "valid", "test"):
        tweets = "".join(f'" छान {split}\n{n}\r\n ओळ",{n % 3 - 1}\r\n' for n in range(2 * ROWS))
        files[f"L3CubeMahaSent Dataset/tweets-{split}.csv"] = f"tweet,label\r\n{tweets}".encode()
        words = [
            (f"शब्द{n}{len(split)}", ("BNEP", "INEP", "O", "BNEL", "O")[n % 5], f"{n // 5 + 1}.0") for n in range(60)
        ]
        lines = "".join("\t".join(row) + "\n" for row in words)
        files[f"L3Cube-MahaNER/IOB/{split}_iob.txt"] = f"words\tlabels\tsentence_id\n{lines}".encode()
    return files


def indic_glue() -> Files:
    """Parquet files of several tasks; a configuration is a task and a language."""
    labels = ClassLabel(names=["negative", "neutral", "positive"])
    reviews = Features({"text": Value("string"), "label": labels})
    names = Features({"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=TAGS))})
    files, configs = dict[str, bytes](), dict[str, dict[str, str]]()
    for config in ("iitp-mr.hi", "wiki-ner.ta"):
        splits = ("train", "validation", "test")
        configs[config] = {split: f"{config}/{split}-*" for split in splits}
        for split in splits:
            if config == "iitp-mr.hi":
                content = parquet([{"text": f"फिल्म {split} {n}", "label": n % 3} for n in range(ROWS)], reviews)
            else:
                rows = [{"tokens": ["சென்னை", split, str(n)], "ner_tags": [5, 0, 0]} for n in range(ROWS)]
                content = parquet(rows, names)
            files[f"{config}/{split}-00000-of-00001.parquet"] = content
    return {"README.md": card(configs), **files}


def indic_align() -> Files:
    """Conversations as lists of question and answer; files have names of their own, which README.md knows."""
    turns = [{"interactions": [[f"गिनो {n}", f"एक {n}"], ["फिर", f"दो {n}"]]} for n in range(ROWS)]
    files = {"indicalign-instruct/anudesh/Anudesh.parquet": parquet(turns)}
    files["indicalign-instruct/wiki_chat/wiki_chat_0000_of_0031.parquet"] = parquet(turns)
    configs = {
        "Anudesh": {"train": "indicalign-instruct/anudesh/*"},
        "Wiki_Chat": {"train": "indicalign-instruct/wiki_chat/*"},
    }
    return {"README.md": card(configs), **files}


def tweets() -> Files:
    """A csv file of tweets."""
    lines = "".join(f"सुबह {n},{('good', 'bad')[n % 2]}\n" for n in range(ROWS))
    return {"README.md": PAGE, "train.csv": f"text,label\n{lines}".encode()}


MADE: Mapping[str, Callable[[], Files]] = {
    "ai4bharat/IndicSentiment": indic_sentiment,
    "ai4bharat/IndicSentiment-Translated": indic_sentiment_translated,
    "ai4bharat/indic-instruct-data-v0.1": indic_instruct,
    "Divyanshu/indicxnli": lambda: indicxnli()[0],
    "ai4bharat/naamapadam": lambda: naamapadam()[0],
    "l3cube-pune/MarathiNLP": marathi_nlp,
    "ai4bharat/indic_glue": indic_glue,
    "ai4bharat/indic-align": indic_align,
    "someone/gated-tweets": tweets,
    "someone/tweets": tweets,
}
_OF_SCRIPTS = {"Divyanshu/indicxnli": indicxnli, "ai4bharat/naamapadam": naamapadam}
GATED, OLD_NAME, NEW_NAME = "someone/gated-tweets", "someone/old-tweets", "someone/tweets"


def fill(shelf: Shelf) -> dict[str, Repository]:
    """Put all of them on a shelf; returns them by name."""
    made = {name: shelf.add(name, files(), "datasets", gated=name == GATED) for name, files in MADE.items()}
    for name, both in _OF_SCRIPTS.items():
        made[name].commit(both()[1], CONVERTED)
    shelf.add(OLD_NAME, {}, "datasets", moved_to=NEW_NAME)
    return made


def _named(name: str, *flags: str) -> tuple[str, ...]:
    return ("--dataset_name", name, *flags)


_OF_INSTRUCT = "ai4bharat/indic-instruct-data-v0.1"
GITHUB = "https://raw.githubusercontent.com"
_MARATHI = f"{GITHUB}/l3cube-pune/MarathiNLP/main"
_IN_TEN_COLUMNS = ("--text_column", "INDIC REVIEW", "--label_column", "LABEL")
_PAIR = ("--text_column", "premise", "--text_pair_column", "hypothesis")
SETS: Mapping[str, Published] = {
    "ai4bharat/IndicSentiment-Translated": Published(
        "parquet, no split named train",
        (
            *("sentiment", *_named("ai4bharat/IndicSentiment-Translated", *_IN_TEN_COLUMNS)),
            *("--dataset_splits", "train=validation[:75%]", "validation=validation[75%:]", "test=test"),
        ),
        "ai4bharat/IndicSentiment-Translated",
    ),
    "ai4bharat/IndicSentiment": Published(
        "a script, and no converted files; json files of thirteen languages, no training rows, rows without a label",
        (
            *("sentiment", "--train_file", "hf://datasets/ai4bharat/IndicSentiment/data/validation/hi.json"),
            *("--test_file", "hf://datasets/ai4bharat/IndicSentiment/data/test/{language}.json", *_IN_TEN_COLUMNS),
            *("--bad_rows", "quarantine", "--max_bad_fraction", "0.1"),
        ),
        "ai4bharat/IndicSentiment",
    ),
    f"{_OF_INSTRUCT} (messages)": Published(
        "eight configurations, splits `en` and `hi`",
        (
            *("llama", *_named(_OF_INSTRUCT, "--dataset_config_name", "anudesh", "oasst1")),
            *("--dataset_splits", "train=en+hi[:90%]", "validation=hi[90%:]"),
        ),
        _OF_INSTRUCT,
    ),
    f"{_OF_INSTRUCT} (dolly)": Published(
        "columns instruction, context, response",
        (
            *("llama", *_named(_OF_INSTRUCT, "--dataset_config_name", "dolly", "--dataset_splits", "train=hi")),
            *("--columns", "input=context,output=response"),
        ),
        _OF_INSTRUCT,
    ),
    f"{_OF_INSTRUCT} (nmt-seed)": Published(
        "the folder is `nmt`; only `hi`; columns input_text, output_text",
        (
            *("llama", *_named(_OF_INSTRUCT, "--dataset_config_name", "nmt-seed", "--dataset_splits", "train=hi")),
            *("--columns", "prompt=input_text,completion=output_text"),
        ),
        _OF_INSTRUCT,
    ),
    "Divyanshu/indicxnli": Published(
        "a script; the Hub's converted files are read; a configuration is a language; two texts",
        ("sentiment", *_named("Divyanshu/indicxnli", "--dataset_config_name", "hi", "ta", *_PAIR)),
        "Divyanshu/indicxnli",
    ),
    "ai4bharat/naamapadam": Published(
        "a script; the Hub's converted files are read, of some languages",
        ("ner", *_named("ai4bharat/naamapadam", "--dataset_config_name", "hi")),
        "ai4bharat/naamapadam",
    ),
    "L3CubeMahaSent": Published(
        "csv on GitHub, a folder with a blank in its name, cells with line feeds",
        (
            *("sentiment", "--train_file", f"{_MARATHI}/L3CubeMahaSent%20Dataset/tweets-train.csv"),
            *("--validation_file", f"{_MARATHI}/L3CubeMahaSent%20Dataset/tweets-valid.csv"),
            *("--problem_type", "single_label_classification"),
        ),
        "l3cube-pune/MarathiNLP",
    ),
    "L3Cube-MahaNER": Published(
        "text files on GitHub with a header, a sentence id for blank lines, tags BNEP and INEP",
        ("ner", "--train_file", f"{_MARATHI}/L3Cube-MahaNER/IOB/train_iob.txt"),
        "l3cube-pune/MarathiNLP",
    ),
    "ai4bharat/indic_glue (iitp-mr.hi)": Published(
        "parquet; a configuration is a task and a language",
        ("sentiment", *_named("ai4bharat/indic_glue", "--dataset_config_name", "iitp-mr.hi")),
        "ai4bharat/indic_glue",
    ),
    "ai4bharat/indic_glue (wiki-ner.ta)": Published(
        "the same, with lists of words and class ids",
        ("ner", *_named("ai4bharat/indic_glue", "--dataset_config_name", "wiki-ner.ta")),
        "ai4bharat/indic_glue",
    ),
    "ai4bharat/indic-align": Published(
        "a column `interactions`: lists of question and answer; names of files that README.md lists",
        ("llama", *_named("ai4bharat/indic-align", "--dataset_config_name", "Anudesh", "Wiki_Chat")),
        "ai4bharat/indic-align",
    ),
    "a gated dataset": Published("files need a token that was let in", ("sentiment", *_named(GATED)), GATED),
    "a renamed dataset": Published("the Hub redirects from its old name", ("sentiment", *_named(OLD_NAME)), NEW_NAME),
}
