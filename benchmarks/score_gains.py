"""Which settings raise the macro-F1 of a classifier: each alone against the same base, on the same rows and seeds.

    indictune recipes --weights
    pip install indic-transliteration
    python -m benchmarks.score_gains --data ../shared/data/sentiment --sets hinglish_300 marathi_300 --processes 2

A plain loop of torch in float32, so that a setting can be tried before anything is built for it. The base: a linear
schedule with 10% warm-up, AdamW with a weight decay of 0.01, gradients clipped at 1, batches of one length, and the
weights of the last step. A setting has gained if its mean is above the base's by twice the standard error of the
difference of the seeds' scores. Each run is kept in --work, and the next start takes it from there.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import f1_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.environment import environment, write_results
from benchmarks.quality import SETS, rows_of
from indictune.data.text.cleaning import clean
from indictune.models import builtin, fetched
from indictune.models.ngrams import ngram_learner
from indictune.training.scored_rows import Ngrams

Rows = list[tuple[list[int], Any]]  # token ids, and a class or the probability of each


@dataclass(frozen=True)
class Setting:
    """What a run does. Everything that is 0 or False is off."""

    learning_rate: float = 1e-4
    batch: int = 16
    epochs: int = 4
    warm_up: float = 0.1
    layer_decay: float = 1.0  # each layer's learning rate, as a part of that of the layer above
    frozen_embeddings: bool = False
    mean_pooling: bool = False
    identity_pooler: bool = (
        False  # the pooler of the first token, which e5 lacks, begins as identity and not at random
    )
    averaged: float = 0.0  # the last part of the updates, whose weights are averaged
    dropout: float = 0.0
    smoothing: float = 0.0
    class_weights: bool = False
    r_drop: float = 0.0  # weight of the divergence of two passes (Liang et al. 2021)
    transliterated: bool = False
    ngrams: float = 0.0  # share of the target that n-grams give, which have not learned the row


NGRAMS = "n-grams"
VARIANTS: dict[str, dict[str, Any]] = {
    NGRAMS: {},
    "base": {},
    "learning rate 5e-5": {"learning_rate": 5e-5},
    "learning rate 2e-4": {"learning_rate": 2e-4},
    "learning rate 4e-4": {"learning_rate": 4e-4},
    "batches of 32": {"batch": 32},
    "batches of 8": {"batch": 8},
    "half of the epochs": {"epochs": -2},
    "twice the epochs": {"epochs": 2},
    "without warm-up": {"warm_up": 0.0},
    "layer-wise learning rates, 0.9": {"layer_decay": 0.9},
    "frozen embeddings": {"frozen_embeddings": True},
    "mean pooling": {"mean_pooling": True},
    "pooler begins as identity": {"identity_pooler": True},
    "averaged weights": {"averaged": 0.3},
    "dropout 0.1": {"dropout": 0.1},
    "label smoothing 0.1": {"smoothing": 0.1},
    "class weights": {"class_weights": True},
    "R-Drop 1, dropout 0.1": {"r_drop": 1.0, "dropout": 0.1},
    "transliterated rows": {"transliterated": True},
    "half of the target from n-grams": {"ngrams": 0.5},
}
EPOCHS = {300: 10, 1_436: 4, 3_000: 4}  # of the base, by rows
MAX_LENGTH = 128


def setting_of(variant: str, rows: int) -> Setting:
    """The base for so many rows, with what the variant changes."""
    changes = dict(VARIANTS[variant])
    epochs = EPOCHS.get(rows, 3)
    times = changes.pop("epochs", 1)
    return replace(Setting(), epochs=epochs * times if times > 0 else epochs // -times, **changes)


def in_devanagari(text: str) -> str:
    """Words in Latin letters as Devanagari, by the rules of ITRANS; links, handles and marks stay."""
    sanscript = importlib.import_module("indic_transliteration.sanscript")

    words = text.split()
    plain = [word.lower() if word.isascii() and word.isalpha() else "" for word in words]
    turned = [
        sanscript.transliterate(word, sanscript.OPTITRANS, sanscript.DEVANAGARI) if word else "" for word in plain
    ]
    return " ".join(new or old for new, old in zip(turned, words, strict=True))


def targets_of_ngrams(texts: list[str], labels: list[int], share: float, seed: int) -> list[list[float]]:
    """`share` of what n-grams say that learned four fifths of the rows without this one, and the rest of its label."""
    learner = make_pipeline(*ngram_learner())
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    said = cross_val_predict(learner, texts, labels, cv=folds, method="predict_proba")
    mixed: list[list[float]] = (share * said + (1 - share) * np.eye(said.shape[1])[labels]).tolist()
    return mixed


def batches(rows: Rows, size: int, order: random.Random) -> list[Rows]:
    """An epoch: rows of about one length together, batches in random order."""
    shuffled = order.sample(rows, len(rows))
    pools = (shuffled[at : at + 16 * size] for at in range(0, len(shuffled), 16 * size))
    found = []
    for pool in pools:
        pool.sort(key=lambda row: len(row[0]))
        found += [pool[at : at + size] for at in range(0, len(pool), size)]
    order.shuffle(found)
    return found


def padded(rows: Rows, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest], and labels [rows]."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([each + [pad] * (longest - len(each)) for each, _ in rows])
    mask = torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each, _ in rows])
    return ids, mask, torch.tensor([label for _, label in rows])


class Run:
    """One training and its scores."""

    def __init__(self, setting: Setting, model: str, rows: dict[str, Rows], classes: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.setting, self.rows, self.order = setting, rows, random.Random(seed)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(
            model,
            num_labels=classes,
            hidden_dropout_prob=setting.dropout,
            attention_probs_dropout_prob=setting.dropout,
        )
        if setting.identity_pooler:
            torch.nn.init.eye_(self.model.bert.pooler.dense.weight)
        self.pad = int(self.model.config.pad_token_id)
        weights = None
        if setting.class_weights:
            counts = np.bincount([label for _, label in rows["train"]], minlength=classes)
            weights = torch.tensor(counts.sum() / (classes * np.maximum(counts, 1)), dtype=torch.float32)
        self.loss: Callable[..., torch.Tensor] = torch.nn.CrossEntropyLoss(weights, label_smoothing=setting.smoothing)
        self._keep_used_embeddings()

    def _keep_used_embeddings(self) -> None:
        """Rows of embeddings that no text uses are dropped, for speed: they would get no gradient."""
        embedding = self.model.get_input_embeddings()
        used = sorted({id for part in self.rows.values() for ids, _ in part for id in ids} | {self.pad})
        weight = embedding.weight.data[used].clone()
        places = {id: place for place, id in enumerate(used)}
        self.rows = {
            name: [([places[id] for id in ids], label) for ids, label in part] for name, part in self.rows.items()
        }
        self.pad = places[self.pad]
        kept = torch.nn.Embedding(len(weight), weight.shape[1], _weight=weight)
        self.model.set_input_embeddings(kept)

    def logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[rows, classes]"""
        found: torch.Tensor
        if self.setting.mean_pooling:
            states = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            found = self.model.classifier(self.model.dropout(means))
        else:
            found = self.model(input_ids=ids, attention_mask=mask).logits
        return found

    def groups(self) -> list[dict[str, Any]]:
        """Parameters by depth: the head has the whole learning rate, a layer a part of that of the layer above."""
        layers = self.model.config.num_hidden_layers
        found = []
        for name, weight in self.model.named_parameters():
            words = name.split(".")
            depth = layers if "embeddings" in words else 0
            if "layer" in words:
                depth = layers - 1 - int(words[words.index("layer") + 1])
            if self.setting.frozen_embeddings and "word_embeddings" in words:
                weight.requires_grad_(False)
                continue
            decay = 0.0 if weight.ndim == 1 else 0.01
            rate = self.setting.learning_rate * self.setting.layer_decay**depth
            found.append({"params": [weight], "lr": rate, "weight_decay": decay})
        return found

    def train(self) -> list[np.ndarray]:
        """Train to the end of the schedule. Gives the predictions after each epoch."""
        setting = self.setting
        total = setting.epochs * math.ceil(len(self.rows["train"]) / setting.batch)
        warm = max(1, round(setting.warm_up * total))
        optimizer = torch.optim.AdamW(self.groups(), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda at: min((at + 1) / warm if setting.warm_up else 1, (total - at) / max(1, total - warm))
        )
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        averaged, summed = 0, [torch.zeros_like(weight) for weight in weights] if setting.averaged else []
        epochs = (batches(self.rows["train"], setting.batch, self.order) for _ in range(setting.epochs))
        after_epochs = list[np.ndarray]()
        for at, batch in enumerate(itertools.chain.from_iterable(epochs)):
            self.model.train()
            self._loss(*padded(batch, self.pad)).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if at >= total * (1 - setting.averaged):
                averaged += 1
                torch._foreach_add_(summed, [weight.data for weight in weights])
            if (at + 1) % (total // setting.epochs) == 0 and at + 1 < total:
                after_epochs.append(self.predicted())
        for weight, sum_ in zip(weights, summed, strict=False):
            weight.data.copy_(sum_ / averaged)
        return [*after_epochs, self.predicted()]

    def _loss(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        first = self.logits(ids, mask)
        if not self.setting.r_drop:
            return self.loss(first, labels)
        second = self.logits(ids, mask)
        one, two = (each.log_softmax(-1) for each in (first, second))
        divergence = torch.nn.functional.kl_div(one, two, reduction="batchmean", log_target=True)
        divergence = (divergence + torch.nn.functional.kl_div(two, one, reduction="batchmean", log_target=True)) / 2
        return (self.loss(first, labels) + self.loss(second, labels)) / 2 + self.setting.r_drop * divergence / 2

    @torch.no_grad()
    def predicted(self) -> np.ndarray:
        """The classes of the test rows."""
        self.model.eval()
        test = self.rows["test"]
        order = sorted(range(len(test)), key=lambda at: len(test[at][0]))
        found = np.zeros(len(test), dtype=int)
        for at in range(0, len(order), 64):
            places = order[at : at + 64]
            ids, mask, _ = padded([test[place] for place in places], self.pad)
            found[places] = self.logits(ids, mask).argmax(-1).numpy()
        return found


def run(job: tuple[str, str, int, Path, Path, str]) -> None:
    """Train one variant on one set, and keep its scores."""
    name, variant, seed, data, work, model = job
    kept = work / f"{name}-{variant.replace(' ', '_')}-{seed}.json"
    if kept.exists():
        return
    torch.set_num_threads(1)
    parts = {
        split: [(clean(row["text"]), row["label"]) for row in rows] for split, rows in rows_of(name, data).items()
    }
    labels = sorted({label for _, label in parts["train"]})
    setting = setting_of(variant, len(parts["train"]))
    right = np.array([labels.index(label) for _, label in parts["test"]])
    about: dict[str, Any] = {"set": name, "variant": variant, "seed": seed}
    began = time.monotonic()
    if variant == NGRAMS:
        learned, scored = ([text for text, _ in parts[split]] for split in ("train", "test"))
        ngrams = Ngrams(learned, np.array([labels.index(label) for _, label in parts["train"]]))
        predicted = ngrams.log_probabilities(scored, len(labels)).argmax(1)
    else:
        if setting.transliterated:
            parts["train"] = parts["train"] + [(in_devanagari(text), label) for text, label in parts["train"]]
            setting = replace(setting, epochs=setting.epochs // 2)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        rows: dict[str, Rows] = {
            split: [
                (ids, labels.index(label))
                for ids, (_, label) in zip(
                    tokenizer([text for text, _ in part], truncation=True, max_length=MAX_LENGTH)["input_ids"],
                    part,
                    strict=True,
                )
            ]
            for split, part in parts.items()
        }
        if setting.ngrams:
            texts, classes = zip(*parts["train"], strict=True)
            numbers = [labels.index(label) for label in classes]
            targets = targets_of_ngrams(list(texts), numbers, setting.ngrams, seed)
            rows["train"] = [(ids, target) for (ids, _), target in zip(rows["train"], targets, strict=True)]
        trained = Run(setting, model, rows, len(labels), seed)
        after_epochs = trained.train()
        predicted = after_epochs[-1]
        about["after_epochs"] = [round(f1_score(right, each, average="macro"), 4) for each in after_epochs]
    about |= {"setting": asdict(setting), "seconds": time.monotonic() - began}
    score = f1_score(right, predicted, average="macro")
    kept.write_text(json.dumps(about | {"macro_f1": score, "predicted": predicted.tolist()}), encoding="utf-8")
    print(f"{name} / {variant} / {seed}: {score:.4f} in {about['seconds']:.0f} s", flush=True)


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each set and variant: the mean, and its gain over the base with its standard error, by seeds."""
    found = []
    for name in dict.fromkeys(each["set"] for each in runs):
        some = {(each["variant"], each["seed"]): each["macro_f1"] for each in runs if each["set"] == name}
        for variant in dict.fromkeys(each["variant"] for each in runs if each["set"] == name):
            seeds = [seed for which, seed in some if which == variant]
            scores = [some[variant, seed] for seed in seeds]
            gains = [some[variant, seed] - some["base", seed] for seed in seeds if ("base", seed) in some]
            error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
            found.append({"set": name, "variant": variant, "seeds": len(seeds), "mean": statistics.mean(scores)})
            found[-1] |= {"gain": statistics.mean(gains) if gains else None, "standard_error": error}
    return found


def main() -> None:
    """Do the runs that are missing, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the jsonl files")
    parser.add_argument("--sets", nargs="+", choices=SETS, required=True)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", default=fetched.NAME)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at once, each with one core")
    parser.add_argument("--work", type=Path, default=Path("outputs/score_gains"))
    parser.add_argument("--name", default="score-gains", help="of the result file")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model = builtin.resolve(options.model)
    jobs = [
        (name, variant, seed, options.data, options.work, model)
        for variant in options.variants
        for seed in range(options.seeds)
        for name in options.sets
    ]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for _ in pool.imap_unordered(run, jobs, chunksize=1):
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.work.glob("*.json"))]
            content = {"environment": environment(), "summary": summary(runs)}
            without = [{key: value for key, value in each.items() if key != "predicted"} for each in runs]
            write_results(options.name, content | {"runs": without})
    for each in summary(runs):
        gain = "" if each["gain"] is None else f"{each['gain']:+.4f}"
        error = "" if each["standard_error"] is None else f" ± {each['standard_error']:.4f}"
        print(f"{each['set']} / {each['variant']}: {each['mean']:.4f} {gain}{error}")


if __name__ == "__main__":
    main()
