"""A training script that ends before it trains."""

import sys

from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.supervise.run import run
from indictune.supervise.session import Session


def main(session: Session) -> None:
    session.decide(SentimentTrainingArguments)
    session.recipe.problems.raise_any()


if __name__ == "__main__":
    sys.exit(run(main, read_recipe(sys.argv[1:], (ModelArguments, DataArguments, SentimentTrainingArguments))))
