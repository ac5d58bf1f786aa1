"""A training script that ends before it trains."""

import sys

from indictune.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config import read_recipe
from indictune.training.running import run
from indictune.training.session import Session


def main(session: Session) -> None:
    session.decide(SentimentTrainingArguments)
    session.recipe.problems.raise_any()


if __name__ == "__main__":
    sys.exit(run(main, read_recipe(sys.argv[1:], (ModelArguments, DataArguments, SentimentTrainingArguments))))
