"""Answers of the trained model: those that `generate` gives, and a file that holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import sacrebleu
import torch
from datasets import Dataset
from transformers import MistralConfig, MistralForCausalLM

from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.data.chat.messages import Message
from indictune.models.attention import ATTENTION
from indictune.run import Run
from indictune.tasks.protocol import Samples
from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.evaluation import greedy, write_samples
from tests.models.tiny import words_tokenizer
from tests.training.tiny import answer_rows, tiny_llama, tiny_trainer

PROMPTS = [[7, 8, 9], [3], [10, 4, 6, 5, 9, 9, 8]]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content + ' . ' }}{% else %}"
    "{% generation %}{{ message.content + ' ' + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("base"), vocab_size=11)  # as many as the tokenizer has


def trained(base: str, folder: Path, **settings: Any) -> LlamaTrainer:
    rows = answer_rows(9, 5, vocab_size=11)
    trainer = tiny_trainer(base, folder, rows, learning_rate=0.3, **settings)
    trainer.train()
    return trainer


def generated(trainer: LlamaTrainer, prompt: list[int], **settings: Any) -> list[int]:
    model: Any = trainer.model
    ids = model.generate(input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=12, **settings)
    answer: list[int] = ids[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "lora", "gradient_checkpointing": True},
        *(pytest.param(each, marks=pytest.mark.more) for each in ({}, {"method": "lora"})),
    ],
)
def test_it_is_what_generate_gives(base: str, tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer = trained(base, tmp_path, **settings)
    answers = [greedy(trainer, prompt, 12, ends=[]) for prompt in PROMPTS]
    assert answers == [generated(trainer, prompt, eos_token_id=None) for prompt in PROMPTS]
    assert {len(answer) for answer in answers} == {12}
    assert len({token for answer in answers for token in answer}) > 2


@pytest.mark.more
def test_a_model_with_a_window_keeps_to_it_where_it_was_trained_without_padding(tmp_path: Path) -> None:
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = MistralConfig(vocab_size=11, num_key_value_heads=2, initializer_range=0.5, sliding_window=3, **shape)
    MistralForCausalLM(config).save_pretrained(tmp_path / "base")
    words_tokenizer(None).save_pretrained(tmp_path / "base")
    trainer = trained(str(tmp_path / "base"), tmp_path / "out", padded=False)
    prompts = [[number, *PROMPTS[2], *PROMPTS[0]] for number in range(3, 11)]  # of 11 tokens
    answers = [greedy(trainer, prompt, 12, ends=[]) for prompt in prompts]
    assert cast(Any, trainer.model).config._attn_implementation == ATTENTION
    cast(Any, trainer.model).set_attn_implementation("sdpa")
    assert answers == [generated(trainer, prompt, eos_token_id=None) for prompt in prompts]


@pytest.mark.more
def test_it_stops_before_a_token_that_ends_an_answer(base: str, tmp_path: Path) -> None:
    trainer = trained(base, tmp_path)
    whole = greedy(trainer, PROMPTS[0], 12, ends=[])
    end = next(token for token in whole[1:] if token != whole[0])
    assert greedy(trainer, PROMPTS[0], 12, ends=[99, end]) == whole[: whole.index(end)]
    assert generated(trainer, PROMPTS[0], eos_token_id=[99, end]) == whole[: whole.index(end) + 1]
    assert greedy(trainer, PROMPTS[0], 12, ends=[whole[0]]) == []


@pytest.mark.more
def test_it_is_as_long_as_it_may_be(base: str, tmp_path: Path) -> None:
    trainer = trained(base, tmp_path)
    assert greedy(trainer, PROMPTS[0], 3, ends=[]) == greedy(trainer, PROMPTS[0], 12, ends=[])[:3]


def conversations(*texts: str) -> list[list[Message]]:
    roles = ("user", "assistant")
    return [
        [{"role": roles[index % 2], "content": text} for index, text in enumerate(row.split(" | "))] for row in texts
    ]


class TestFile:
    ROWS = conversations("अच्छा | ok", "నయా | மோசம் | ok | చెడు")
    DATA = Dataset.from_dict({"language": ["hi", "te"], "length": [3, 9]})

    @staticmethod
    def run(folder: Path, rank: int = 0) -> Run:
        return Run(read_recipe(["--output_dir", str(folder)], [LlamaTrainingArguments]), rank)

    @pytest.mark.more
    def test_a_line_holds_prompt_reference_and_answer(self, base: str, tmp_path: Path) -> None:
        trainer = trained(base, tmp_path / "run")
        write_samples(trainer, self.run(tmp_path), Samples("test", self.ROWS[:2], self.DATA, TEMPLATE, 4))
        text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [list(line) for line in lines] == [["split", "messages", "prompt", "reference", "answer"]] * 2
        assert [line["messages"] for line in lines] == [row[:-1] for row in self.ROWS[:2]]
        assert {line["split"] for line in lines} == {"test"}
        assert [line["prompt"] for line in lines] == ["अच्छा .", "[UNK] . மோசம் </s> ok ."]
        assert [line["reference"] for line in lines] == ["ok", "చెడు"]
        tokenizer: Any = trainer.processing_class
        answers = [greedy(trainer, ids, 4, ends=[2]) for ids in ([3, 10], [1, 10, 8, 2, 9, 10])]
        assert [line["answer"] for line in lines] == [tokenizer.decode(each) for each in answers]
        assert "अच्छा" in text
        assert trainer.written is not None
        chrf = sacrebleu.corpus_chrf([line["answer"] for line in lines], [["ok", "చెడు"]])
        assert trainer.written.overall.scores["chrf"].value == pytest.approx(chrf.score)
        assert list(trainer.written.by["language"]) == ["hi", "te"]

    @pytest.mark.more
    @pytest.mark.parametrize(("is_asked", "rank"), [(False, 0), (True, 1)])
    def test_nothing_is_written_without_rows_or_by_other_ranks(
        self, base: str, tmp_path: Path, is_asked: bool, rank: int
    ) -> None:
        trainer = trained(base, tmp_path / "run")
        samples = Samples("test", self.ROWS[:2], self.DATA, TEMPLATE, 1) if is_asked else None
        write_samples(trainer, self.run(tmp_path, rank), samples)
        assert not (tmp_path / "samples.jsonl").exists()
