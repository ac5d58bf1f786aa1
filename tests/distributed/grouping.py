"""A script that brings up what a training needs, and prints the seconds that each of its groups waits.

It fails where it is started for the first time and may be started again.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from datasets import Dataset
from torch.distributed import distributed_c10d

from indictune.config.recipe import read_recipe
from indictune.distributed import elastic
from indictune.distributed.launch import engine_of
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.supervise.execute import execute
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Tokens
from indictune.training.start import start_ranks


def main(run: Run) -> None:
    if elastic.restarts_so_far(os.environ) < elastic.most_restarts(os.environ):
        raise RuntimeError("to be started again")
    plan, _ = make_plan(run.recipe, os.environ, Classification())
    no_rows = Dataset.from_dict({"length": [], "input_ids": [], "labels": [], "language": []})
    start_ranks(plan, run, Tokens(no_rows, no_rows, None, str))
    if engine_of(plan.launch.strategy).startswith("zero"):
        from deepspeed.utils import groups  # slow

        groups._get_data_parallel_group()  # in which its engine sums gradients
    made = [(group.group_desc, group._get_backend(torch.device("cpu"))) for group in distributed_c10d._world.pg_map]
    run.show(json.dumps([[name, backend.options._timeout.total_seconds()] for name, backend in made]))


if __name__ == "__main__":
    sys.exit(execute(main, read_recipe(sys.argv[1:], Classification.arguments)))
