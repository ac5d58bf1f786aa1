"""An adapter for tagging, from a published layout to its labels: trained, scored, merged and described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from indictune.api import evaluate, predict, train
from indictune.commands.merge import MergeFlags, merge_adapter
from indictune.run_result import Result
from tests.ranks.launching import ROOT

pytestmark = pytest.mark.more

TRAIN = ROOT / "tests/inputs/ner_glued_ids.txt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("tagger")
    lines = TRAIN.read_text(encoding="utf-8").splitlines()[1:]
    (folder / "valid.txt").write_text("\n".join(["शब्द\tटैग\tवाक्य", *lines]), encoding="utf-8")
    settings: dict[str, Any] = {"word_column": "शब्द", "tag_column": "टैग", "sentence_column": "वाक्य"}
    settings |= dict.fromkeys(("train_file", "validation_file"), str(folder / "valid.txt"))
    settings |= {"learning_rate": "5e-2", "global_batch_size": 3, "per_device_train_batch_size": 3}
    settings |= {"method": "lora", "num_train_epochs": 40, "max_length": "auto", "output_dir": folder / "out"}
    return train("ner", **settings)


def test_an_adapter_learns_the_tags_and_its_folder_tells_their_scheme(run: Result) -> None:
    assert run.metrics["eval"]["f1"] > 0.8
    assert sorted(run.metrics["eval"]["per_entity"]) == ["ED", "NEL", "NEP", "NETI"]
    told = run.metrics["data"]["tags"]
    assert "IOB2 (BX, IX)" in told
    assert told in (run.folder / "README.md").read_text(encoding="utf-8")
    assert told in (run.folder / "report.html").read_text(encoding="utf-8")
    assert json.loads((run.folder / "adapter_config.json").read_text())["task_type"] == "TOKEN_CLS"


def test_evaluate_predict_and_merge_agree_with_the_run(run: Result, tmp_path: Path) -> None:
    test_file = run.folder.parent / "valid.txt"
    again = evaluate(run, test_file, output_dir=tmp_path / "again")
    assert again["test"]["f1"] == run.metrics["eval"]["f1"]
    rows = [json.loads(line) for line in (run.folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = ["लता देशमुख मुख्यमंत्री होत्या", "सोमवारी पुण्यात पाऊस", "मुंबई शहर उपायुक्त साहेब"]
    assert [row["label"] for row in predict(texts, run)] == [row["predicted"] for row in rows]
    merge_adapter(MergeFlags(str(run.folder), str(tmp_path / "merged")))
    assert [row["label"] for row in predict(texts, tmp_path / "merged")] == [row["predicted"] for row in rows]
