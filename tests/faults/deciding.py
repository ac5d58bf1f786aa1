"""A training script that ends before it trains."""

import os
import sys

from indictune.config.recipe import read_recipe
from indictune.errors import Problems
from indictune.preflight import checks
from indictune.preflight.values import make_plan
from indictune.run import Run
from indictune.supervise.execute import execute
from indictune.tasks.classification import Classification


def main(run: Run) -> None:
    task = Classification()
    plan, problems = make_plan(run.recipe, os.environ, task)
    Problems(problems + checks.preflight(plan, task)).raise_any()


if __name__ == "__main__":
    sys.exit(execute(main, read_recipe(sys.argv[1:], Classification.arguments())))
