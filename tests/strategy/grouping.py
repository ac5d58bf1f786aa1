"""A script that brings up what a training needs, and prints the seconds that each of its groups waits.

It fails where it is started for the first time and may be started again.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.distributed import distributed_c10d

from indictune.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config import read_recipe
from indictune.strategy import restart
from indictune.training.running import run
from indictune.training.session import Session


def main(session: Session) -> None:
    if restart.count(os.environ) < restart.limit(os.environ):
        raise RuntimeError("to be started again")
    session.decide(SentimentTrainingArguments)
    session.recipe.problems.raise_any()
    session.start(SentimentTrainingArguments, has_validation=True)
    if session.launch.family.startswith("zero"):
        from deepspeed.utils import groups  # slow

        groups._get_data_parallel_group()  # in which its engine sums gradients
    made = [(group.group_desc, group._get_backend(torch.device("cpu"))) for group in distributed_c10d._world.pg_map]
    session.show(json.dumps([[name, backend.options._timeout.total_seconds()] for name, backend in made]))


if __name__ == "__main__":
    sys.exit(run(main, read_recipe(sys.argv[1:], (ModelArguments, DataArguments, SentimentTrainingArguments))))
