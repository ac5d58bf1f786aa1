"""What only a classifier's run is refused for."""

from __future__ import annotations

import pyarrow as pa
import pytest

from indictune.data.load_rows import Rows
from indictune.errors import UserError
from indictune.evaluation.metrics import classification_metrics, flatten_for_trainer
from indictune.tasks.classification import check_metric


def rows(*languages: str) -> Rows:
    return Rows(pa.table({"language": list(languages)}), "v.jsonl", "--validation_file")


def test_the_metrics_that_an_evaluation_gives_pass_and_others_do_not() -> None:
    languages = ["ta", "hi", "ta", "a|b"]
    block = classification_metrics(
        predictions=[0] * 4, references=[0] * 4, losses=[0.0] * 4, languages=languages, label_names=["a", "b"]
    )
    given = flatten_for_trainer(block)
    assert len(given) == 9
    for name in given:
        check_metric(name, rows(*languages), ["a", "b"])
        check_metric(f"eval_{name}", rows(*languages), ["a", "b"])
    for name in ("macro_f1_te", "macro_f1_", "macro_f1_a|b", "f1_c"):
        with pytest.raises(UserError) as raised:
            check_metric(name, rows(*languages))
        assert (raised.value.code, raised.value.flag) == ("metric-of-unseen-language", "--metric_for_best_model")
        assert "macro_f1_a_b or macro_f1_hi or macro_f1_ta" in raised.value.message
