"""Rows a second of a small BERT on real tweets, beside transformers' Trainer, plain and at its best.

    python -m benchmarks.speed [--data ../shared/data/sentiment] [--steps 2] [--compile]

`trainer_defaults` is as transformers' run_classification.py has it: rows padded to 128, in fp32; its batches are of 64
rows, as all others' are, where the script's default is 8. Every contender lives in its own process; they take turns,
lap by lap, and the first lap of each is left out. BERT of 4 layers x 256 from random weights, batches of 64 rows,
texts cut to 128 tokens, all cores. A vocabulary of 250,000 is one of 30,000 learned from the tweets and rows that no
tweet uses, as in a model of many languages; `trained_vocabulary` is how many of them a contender trains. `ours_padded`
is ours with the padding put back: where it is not slower, or another of ours pads, this fails when all is written.
Padding is that of what all layers compute; on a CPU, attention alone pads rows of like length (`LIKE_LENGTH` in
indictune/models/attention.py).

The loss of ours in fp32 without dropout is compared with the Trainer's on the same padded batches, step by step, while
the model learns a few of the rows by heart; where it is further off than 1e-4, or does not fall, this fails, too.
`--steps` of a lap make it longer where the machine is unsteady; the table has the median of the laps' ratios, the
least and the largest. `--compile` (minutes) adds a contender of a compiled model, whose loss is then the one compared;
its first lap, which is left out, has most of the compilation, and the least of its ratios a lap that met lengths for
which it compiled anew. Contenders in bf16 round: `benchmarks.seeds` compares their loss.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.trainer_pt_utils import get_length_grouped_indices

from benchmarks.agreement import AIM, has_learned, largest_difference, tell_distance, tell_fall
from benchmarks.contenders import BATCH_SIZE, MAX_LENGTH, Contender, Job, compete
from benchmarks.environment import environment, write_results
from indictune.console_text import table
from indictune.data.cleaning import clean
from indictune.models.tiny_bert import train_tokenizer

SAMPLES = Path(__file__).parents[1] / "indictune/data/samples"
VOCABULARIES = (30_000, 250_000)
BASELINES = ("trainer_defaults", "trainer_best", "ours_fp32")
LAPS = 5
PADDED = 0.9  # of the speed of ours, at most
STEPS_OF_CURVE, ROWS_OF_CURVE = 36, 4 * BATCH_SIZE  # that are seen again and again
DRAWS = 1000  # of batches for a lap
FP32 = {"dropout": 0.0, "logging_steps": 1}
LEARNS = {**FP32, "learning_rate": 1e-3}  # from random weights, within a curve

Row = dict[str, str]


def read_tweets(data: Path) -> list[Row]:
    """Real tweets, or the built-in ones where there are none; cleaned, so that all contenders see the same texts.

    As many as fill whole batches: of a step with fewer rows no speed would be known.
    """
    real = data / "hinglish_tweets.train.jsonl"
    path = real if real.exists() else SAMPLES / "train.jsonl"
    with path.open(encoding="utf-8") as lines:
        rows = [{**row, "text": clean(row["text"])} for row in map(json.loads, lines)]
    return rows[: len(rows) // BATCH_SIZE * BATCH_SIZE]


def write_model(folder: Path, rows: Sequence[Row], vocab_size: int) -> None:
    """A BERT from random weights with a head, and a tokenizer learned from the rows."""
    tokenizer = train_tokenizer([row["text"] for row in rows], min(vocab_size, VOCABULARIES[0]), MAX_LENGTH)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        id2label=dict(enumerate(sorted({row["label"] for row in rows}))),
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def grouped_by_length(
    model: Path,
    rows: Sequence[Row],
    laps: int,
    steps_per_lap: int,
    batch_size: int = BATCH_SIZE,
    warm_up_steps: int = 0,
    seed: int = 0,
) -> tuple[int, ...]:
    """Rows in batches as `train_sampling_strategy: group_by_length` makes them, for laps that are like a whole epoch.

    The sampler begins with its longest batches; a short run of it would see nothing else. Every lap gets a batch of
    each band of lengths instead, so that it has as many places a row as all batches have: of many draws, the nearest.
    Its longest come first, as the sampler's do; they warm it up, and are then timed with the others.
    """
    lengths = lengths_of(model, rows)
    seeded = torch.Generator().manual_seed(seed)
    order = get_length_grouped_indices(lengths, batch_size, generator=seeded)  # type: ignore[no-untyped-call]
    whole = len(order) // batch_size * batch_size
    batches = [order[start : start + batch_size] for start in range(0, whole, batch_size)]
    batches.sort(key=lambda batch: max(lengths[row] for row in batch), reverse=True)
    places = np.array([max(lengths[row] for row in batch) for batch in batches])
    bands = np.array_split(np.arange(len(batches)), steps_per_lap)
    generator = np.random.default_rng(seed)
    chosen: list[int] = []
    for _ in range(laps):
        draws = np.stack([generator.choice(band, DRAWS) for band in bands], axis=1)
        lap = draws[np.abs(places[draws].mean(axis=1) - places.mean()).argmin()].tolist()
        chosen += [*lap[:warm_up_steps], *lap]
    return tuple(row for number in chosen for row in batches[number])


def lengths_of(model: Path, rows: Sequence[Row]) -> list[int]:
    """Tokens of each row, cut as all contenders cut it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [row["text"] for row in rows]
    return [len(ids) for ids in tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]]


def contenders(grouped: tuple[int, ...], compiled: bool = False) -> list[Contender]:
    """Who runs, in this order."""
    best = {"bf16": True, "optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
    return [
        Contender("trainer_defaults", "max_length"),
        Contender("trainer_best", "longest", best, grouped),
        Contender("ours_fp32"),
        Contender("ours_bf16", settings={"bf16": "true"}),
        Contender("ours_padded", settings={"padding_free": "off"}),
        Contender("ours_whole_vocabulary", settings={"active_vocabulary": "off"}),
        *([Contender("ours_compiled", settings={"bf16": "true", "torch_compile": "true"})] if compiled else []),
    ]


class Runner:
    """A contender's process, seen from the parent.

    Args:
        contender: that runs.
        job: of all.
        target: the life of the process.
        patience: after how many seconds of silence it has failed, asked anew each time; None never.

    Attributes:
        seconds_to_ready: from its start to where training begins.
        counted: what it had counted after its last lap.

    Raises:
        RuntimeError: it failed; so do the methods.
    """

    def __init__(
        self,
        contender: Contender,
        job: Job,
        target: Callable[[Contender, Job, Connection], None] = compete,
        patience: Callable[[], float | None] = lambda: None,
    ) -> None:
        since = time.perf_counter()
        context = multiprocessing.get_context("spawn")
        self.log = job.folder / f"{contender.title}.log"
        self.title = contender.title
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.counted: dict[str, Any] = {}
        # Not a daemon, which could start no processes to load rows; so that it is ended with this one is up to us.
        self.process: BaseProcess = context.Process(target=_live, args=(target, contender, job, theirs))
        self.patience = patience
        self.process.start()
        Finalize(self, self.process.kill, exitpriority=0)
        theirs.close()
        self._hear()  # it is ready
        self.seconds_to_ready = time.perf_counter() - since

    def lap(self) -> float:
        """Let it run a lap; returns its seconds."""
        seconds, self.counted = self._ask("go")
        return float(seconds)

    def finish(self) -> dict[str, Any]:
        """What it has counted when it stops now. What it would do then is cut off."""
        counted: dict[str, Any] = self._ask("stop")
        self.end()
        return counted

    def end(self) -> None:
        """Wherever it is."""
        self.process.kill()
        self.process.join()

    def _ask(self, word: str) -> Any:
        try:
            self.connection.send(word)
        except ConnectionError:  # it died between its turns
            raise self._failure() from None
        return self._hear()

    def _hear(self) -> Any:
        try:
            patience_s = self.patience()
            if not self.connection.poll(patience_s):
                raise RuntimeError(f"{self.title} said nothing for {patience_s:.0f} s.")
            return self.connection.recv()
        except (EOFError, OSError):  # between two messages, or within one
            raise self._failure() from None

    def _failure(self) -> RuntimeError:
        """With its last words; it may have ended within a letter, or before there was a log."""
        words = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return RuntimeError(f"{self.title} failed:\n{words}")


def _live(
    target: Callable[[Contender, Job, Connection], None], contender: Contender, job: Job, connection: Connection
) -> None:
    """Start further processes as a script does: one that is spawned would spawn its own, which import all anew."""
    multiprocessing.set_start_method(None, force=True)
    target(contender, job, connection)


def compare(
    rows: Sequence[Row], vocab_size: int, folder: Path, steps_per_lap: int, compiled: bool
) -> list[dict[str, Any]]:
    """The contenders' lines of the table for one vocabulary."""
    model, train_file = folder / "model", write_rows(rows, folder / "train.jsonl")
    write_model(model, rows, vocab_size)
    job = Job(model, train_file, (1 + LAPS) * steps_per_lap, steps_per_lap, folder)
    grouped = grouped_by_length(model, rows, 1 + LAPS, steps_per_lap)
    with ThreadPoolExecutor(2) as pool:
        runners = list(pool.map(lambda contender: Runner(contender, job), contenders(grouped, compiled)))
    laps = [[runner.lap() for runner in runners] for _ in range(1 + LAPS)][1:]
    lines = []
    for number, runner in enumerate(runners):
        speeds = [steps_per_lap * BATCH_SIZE / seconds[number] for seconds in laps]
        counted = runner.finish()
        lines.append(
            {
                "contender": runner.title,
                "rows_per_second": round(statistics.median(speeds), 1),
                "rows_per_second_of_each_lap": [round(speed, 1) for speed in speeds],
                "padding_fraction": round(counted["padding_fraction"], 4),
                "tokens_per_row": round(counted["tokens_per_row"], 1),
                "peak_memory_bytes": counted["peak_memory_bytes"],
                "trained_vocabulary": counted["trained_vocabulary"],
            }
        )
    return with_ratios(lines)


def with_ratios(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each line with how many times as fast it is as those that others are compared with, lap by lap."""
    name = "rows_per_second_of_each_lap"
    baselines = [line for line in lines if line["contender"] in BASELINES]
    for line in lines:
        for baseline in baselines:  # each lap beside the baseline's lap of the same round
            ratios = [round(one / other, 2) for one, other in zip(line[name], baseline[name], strict=True)]
            line[f"times_{baseline['contender']}"] = ratios
    return lines


def check_padding_is_seen(lines: Sequence[dict[str, Any]]) -> None:
    """Raise a `RuntimeError` where others of ours than `ours_padded` pad, or where that one is not slower."""
    ours = [line for line in lines if line["contender"].startswith("ours")]
    if (pad := [line["contender"] for line in ours if line["padding_fraction"] > 0]) != ["ours_padded"]:
        raise RuntimeError(f"Of ours, {pad} pad: ours_padded alone should.")
    (ratios,) = (line["times_ours_fp32"] for line in ours if line["contender"] == "ours_padded")
    if statistics.median(ratios) > PADDED:
        raise RuntimeError(f"ours_padded is {middle_and_ends(ratios)} times as fast as ours_fp32.")


def write_rows(rows: Sequence[Row], path: Path) -> Path:
    """As jsonl; returns the path."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run_alone(
    contender: Contender, job: Job, target: Callable[[Contender, Job, Connection], None] = compete
) -> dict[str, Any]:
    """Train without turns; what was counted."""
    runner = Runner(contender, job, target)
    runner.lap()
    return runner.finish()


def compare_losses(rows: Sequence[Row], folder: Path, compiled: bool) -> dict[int, dict[str, Any]]:
    """The loss of each step of ours, and of the plain Trainer on the same batches, in fp32 without dropout.

    By vocabulary: of the larger, ours trains the rows that are used. With `compiled`, ours is a compiled model.
    """
    ours = LEARNS | ({"torch_compile": "true"} if compiled else {})
    train_file = write_rows(rows[:ROWS_OF_CURVE], folder / "train.jsonl")
    found = {}
    for vocab_size in VOCABULARIES:
        own = folder / str(vocab_size)
        own.mkdir()
        write_model(own / "model", rows, vocab_size)
        found[vocab_size] = curves(Job(own / "model", train_file, STEPS_OF_CURVE, STEPS_OF_CURVE, own), ours, LEARNS)
    return found


def curves(job: Job, settings: dict[str, Any], plain_settings: dict[str, Any]) -> dict[str, Any]:
    """The losses of ours and of the plain Trainer, on the same padded batches, and how far apart they are at most.

    Args:
        job: whose lap is the whole run.
        settings: of ours.
        plain_settings: of the Trainer.
    """
    ours = run_alone(Contender("curve_of_ours", settings=settings), job)
    plain = run_alone(Contender("curve_of_trainer", "longest", plain_settings, tuple(ours["order"])), job)
    largest = largest_difference(ours["losses"], plain["losses"])
    return {"steps": job.steps, "ours": ours["losses"], "trainer": plain["losses"], "largest": largest}


def show(vocab_size: int, lines: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    columns = ["rows/s", "padding", "tokens/row", "peak MB", "x defaults", "x best", "x ours fp32"]
    body = [
        [
            line["contender"],
            f"{line['rows_per_second']:.1f}",
            f"{line['padding_fraction']:.1%}",
            f"{line['tokens_per_row']:.1f}",
            f"{line['peak_memory_bytes'] / 1e6:,.0f}",
            *(middle_and_ends(line[f"times_{baseline}"]) for baseline in BASELINES),
        ]
        for line in lines
    ]
    print(table([f"vocabulary {vocab_size:,}", *columns], body), end="\n\n", flush=True)


def middle_and_ends(ratios: Sequence[float]) -> str:
    """The median, the least and the largest."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main() -> None:
    """Measure, print the tables and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/sentiment"), help="folder with jsonl files")
    parser.add_argument("--steps", type=int, default=2, help="of a lap")
    parser.add_argument("--compile", action="store_true", help="measure a compiled model, too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(os.cpu_count())
    rows = read_tweets(options.data)
    results: dict[str, Any] = {"environment": environment(), "rows": len(rows)}
    with tempfile.TemporaryDirectory() as work:
        results |= compare_speeds(rows, Path(work), options.steps, options.compile)
    name = "speed-compiled" if options.compile else "speed"
    if options.steps != parser.get_default("steps"):
        name += f"-laps-of-{options.steps}"
    print(f"written to {write_results(name, results)}")
    check(results)


def check(results: dict[str, Any]) -> None:
    """Raise a `RuntimeError` where the padding is not seen, or a model has not learned, or has learned otherwise."""
    for lines in results["speed"].values():
        check_padding_is_seen(lines)
    for curve in results["losses"].values():
        if not has_learned(curve["ours"]):
            raise RuntimeError(tell_fall(curve["ours"]))
        if not curve["largest"] <= AIM:  # NaN is none
            raise RuntimeError(tell_distance(curve["largest"]))


def compare_speeds(rows: Sequence[Row], work: Path, steps: int, compiled: bool) -> dict[str, Any]:
    """The tables of all vocabularies, printed, and the loss curves."""
    speeds = {}
    for vocab_size in VOCABULARIES:
        folder = work / str(vocab_size)
        folder.mkdir()
        speeds[vocab_size] = compare(rows, vocab_size, folder, steps, compiled)
        show(vocab_size, speeds[vocab_size])
    folder = work / "losses"
    folder.mkdir()
    losses = compare_losses(rows, folder, compiled)
    for vocab_size, curve in losses.items():
        distance = f"{curve['largest']:.1e} from the plain Trainer's at most"
        print(f"vocabulary {vocab_size:,}: loss in fp32 without dropout {distance}")
    return {"laps": LAPS, "steps_of_a_lap": steps, "speed": speeds, "losses": losses}


if __name__ == "__main__":
    main()
