"""A script that brings up what a training needs, and prints the seconds that each of its groups waits.

It fails where it is started for the first time and may be started again.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch.distributed import distributed_c10d

from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.distributed import elastic
from indictune.supervise.run import run
from indictune.supervise.session import Session


def main(session: Session) -> None:
    if elastic.count(os.environ) < elastic.limit(os.environ):
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
