"""By which metrics of a language a classifier's checkpoints can be compared."""

from __future__ import annotations

import pyarrow as pa
import pytest
from transformers import Trainer

from indictune.data.loading import Rows
from indictune.errors import UserError
from indictune.evaluation.metrics import classification_metrics, flatten_for_trainer
from indictune.training.exact import ExactTrainer
from indictune.training.trainer import check_metric


def rows(*languages: str) -> Rows:
    return Rows(pa.table({"language": list(languages)}), "v.jsonl", "--validation_file")


def test_no_private_method_of_the_trainer_that_is_overridden_is_gone() -> None:
    """transformers 5.23. Of one that has another name ours would never be called, and nothing would tell."""
    own = {"_loader", "_write_checkpoint"}
    methods = {name for name, each in vars(ExactTrainer).items() if callable(each) and not name.startswith("__")}
    overridden = {name for name in methods if name.startswith("_")} - own
    assert len(overridden) > 10
    assert overridden - vars(Trainer).keys() == set()


def test_the_metrics_that_an_evaluation_gives_pass_and_others_do_not() -> None:
    languages = ["ta", "hi", "ta", "a|b"]
    block = classification_metrics(
        predictions=[0] * 4, references=[0] * 4, losses=[0.0] * 4, languages=languages, label_names=["a", "b"]
    )
    given = flatten_for_trainer(block)
    assert len(given) == 7
    for name in given:
        check_metric(name, rows(*languages))
        check_metric(f"eval_{name}", rows(*languages))
    for name in ("macro_f1_te", "macro_f1_", "macro_f1_a|b"):
        with pytest.raises(UserError) as raised:
            check_metric(name, rows(*languages))
        assert raised.value.message == (
            f"--metric_for_best_model {name}: no row of v.jsonl has that language; expected macro_f1_a_b or "
            "macro_f1_hi or macro_f1_ta."
        )


def test_of_many_languages_some_are_named() -> None:
    with pytest.raises(UserError, match=r"or macro_f1_x19, or that of one of 5 more\.$"):
        check_metric("macro_f1_hi", rows(*(f"x{number:02}" for number in range(25))))


def test_nothing_is_compared_without_validation_rows() -> None:
    check_metric("macro_f1_te", None)
