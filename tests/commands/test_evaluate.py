"""A language model on tasks of lm-evaluation-harness: a task of one's own, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from indictune.cli import main
from indictune.commands.evaluate import run_evaluate
from indictune.config.command_line import read_flags
from tests.refusals import refused
from tests.training.tiny import tiny_llama

ROWS = [
    ("अच्छा", ["ok", "மோசம்"], 0),
    ("చెడు", ["నయా", "ok"], 1),
    ("ok", ["அच्छा", "ok"], 1),
    ("నయా", ["ok", "చెడు"], 0),
]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with refused("extra-missing", flag="--lm_eval_tasks") as error:
        run_evaluate(read_flags(["--model", "out", "--lm_eval_tasks", "hellaswag"]))
    assert "pip install 'indictune[lm-eval]'" in error.value.message


@pytest.mark.slow
class TestWithThePackage:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("lm_eval", reason="needs the extra lm-eval")

    def test_a_task_of_ones_own_is_scored_as_by_hand(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model, tasks = tiny_llama(tmp_path / "model", vocab_size=11), tmp_path / "tasks"
        tasks.mkdir()
        lines = [dict(zip(("question", "choices", "answer"), row, strict=True)) for row in ROWS]
        (tasks / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        (tasks / "words.yaml").write_text(TASK.replace("ROWS", str(tasks / "rows.jsonl")), encoding="utf-8")
        flags = ["--model", model, "--lm_eval_tasks", "words", "--lm_eval_include_path", str(tasks)]
        assert main(["evaluate", *flags]) == 0
        found = json.loads((tmp_path / "model/evaluation/lm_eval/lm_eval.json").read_text())
        assert found["n-samples"]["words"] == {"original": 4, "effective": 4}
        right = [chosen(model, question, choices) == answer for question, choices, answer in ROWS]
        assert found["results"]["words"]["acc,none"] == sum(right) / 4
        assert f" {sum(right) / 4:.4f} " in capsys.readouterr().out
        limited = ["--lm_eval_limit", "2", "--output_dir", str(tmp_path / "two")]
        assert main(["evaluate", *flags, *limited]) == 0
        two = json.loads((tmp_path / "two/lm_eval.json").read_text())
        assert two["results"]["words"]["acc,none"] == sum(right[:2]) / 2

    def test_an_unknown_task_and_a_flag_of_another_evaluation_are_refused(self, tmp_path: Path) -> None:
        model = tiny_llama(tmp_path / "model", vocab_size=11)
        with refused("lm-eval-unknown-task", flag="--lm_eval_tasks") as error:
            run_evaluate(read_flags(["--model", model, "--lm_eval_tasks", "hellaswg"]))
        assert "hellaswag" in error.value.message
        with refused("no-effect", flag="--test_file"):
            run_evaluate(read_flags(["--model", model, "--lm_eval_tasks", "hellaswag", "--test_file", "f"]))


def chosen(folder: str, question: str, choices: list[str]) -> int:
    """The choice with the highest probability."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)  # in evaluation mode
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for choice in choices:
        context, whole = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in (question, f"{question} {choice}")
        )
        logs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        scores.append(sum(logs[at - 1, whole[at]].item() for at in range(len(context), len(whole))))
    return int(torch.tensor(scores).argmax())
