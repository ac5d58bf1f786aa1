"""Fields of the argument dataclasses, and the checks that all of them share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any

from indictune.errors import Problem, Problems, problem

AUTO = "auto"  # in place of a number: the run finds it

# The smallest value of a field, in whichever dataclass it is. None is allowed.
AT_LEAST = {
    "max_length": 3,  # two tokens are special
    "vocabulary_from_train": 2_000,  # single characters take half of it
    "lora_r": 1,
    "lora_alpha": 1,
    "num_sample_generations": 0,
    "show_mask": 0,
    "gpus": 1,
    "steps": 1,
    "num_processes": 1,
    "tolerance": 0,
    "nodes": 1,
    "max_new_tokens": 1,
    "global_batch_size": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "max_tokens_per_device": 1,
    "port": 0,
    "max_batch_size": 1,
    "max_texts": 1,
    "max_characters": 1,
    "max_request_bytes": 1,
    "requests_per_minute": 0,
    "early_stopping_patience": 1,
    "max_nonfinite_steps": 0,
    "profile_steps": 0,
    "snapshot_steps": 0,
    "divergence_check_steps": 0,
    "ddp_timeout": 1,
    "collective_timeout": 1,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": 1,
    "eval_accumulation_steps": 1,
    "save_total_limit": 1,
    "seed": 0,
    "learning_rate": 0,
    "temperature": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
}

# Fields that hold a share or a probability, below 1. None is allowed.
SHARES = ("dropout", "lora_dropout", "max_bad_fraction", "label_smoothing_factor", "validation_split")

# Fields that hold the largest share that is accepted: 1 accepts all. None is allowed.
LIMITS = ("max_unknown_share", "max_collision_share", "max_near_duplicate_share", "max_conflict_share")


class OneOrMore(argparse.Action):
    """Store one word as a text, and several as a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def flag(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a flag. `help` is its entry in `--help` and in docs/flags.md.

    `more` goes to argparse.
    """
    metadata = {"help": help, **more}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_ranges(arguments: Any) -> list[Problem]:
    """Refuse single values that `AT_LEAST`, `SHARES` and `LIMITS` exclude, NaN included."""
    given = {each.name: getattr(arguments, each.name) for each in fields(arguments) if each.init}
    found = [
        problem("expected-at-least", f"--{name}", given[name], smallest=smallest)
        for name, smallest in AT_LEAST.items()
        if given.get(name) not in (None, AUTO) and not given[name] >= smallest
    ]
    wrong_shares = [name for name in SHARES if given.get(name) is not None and not 0 <= given[name] < 1]
    below_1, accepts_all = "up to, not including, 1", "to 1, which accepts all"
    found += [problem("share-expected", f"--{name}", given[name], range=below_1) for name in wrong_shares]
    wrong_limits = [name for name in LIMITS if given.get(name) is not None and not 0 <= given[name] <= 1]
    return found + [problem("share-expected", f"--{name}", given[name], range=accepts_all) for name in wrong_limits]


class Checked:
    """A base of argument dataclasses that reports all their problems at once."""

    def check(self) -> Iterator[Problem]:
        """The problems of the values. A subclass adds its own to those of `super().check()`."""
        yield from check_ranges(self)

    def __post_init__(self) -> None:
        """Check all values.

        Raises:
            UserError: a value is out of its range, or contradicts another one.
        """
        Problems(self.check()).raise_any()
