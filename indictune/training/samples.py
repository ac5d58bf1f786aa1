"""Write `samples.jsonl`: answers of the trained model and their references."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from accelerate.utils import broadcast
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from indictune.data.chat.chat_tokens import answer_ends, prompt_ids
from indictune.evaluation.intervals import RESAMPLES
from indictune.files import SAMPLES, write_whole
from indictune.progress import OWN_PROGRESS
from indictune.run import Run
from indictune.tasks.protocol import Samples
from indictune.training.task_trainer import TaskTrainer

if TYPE_CHECKING:
    from indictune.evaluation.breakdown import Breakdown


def write_samples(trainer: TaskTrainer, run: Run, samples: Samples | None) -> None:
    """Let the trained model answer conversations, and score what it writes to rows that it was not trained on.

    `samples.jsonl` gets a JSON object a row: `split`, `messages` (before the answer), `prompt` (the same as the model
    reads it), `reference` and `answer`. The scores are in `trainer.written`. All ranks must call it, because each may
    hold a part of the weights.

    Raises:
        Stopped: a rank was asked to stop. A resumed run need not train again.
    """
    if samples is None:
        return
    tokenizer = trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    trainer.asked_before = None  # was of the training, where a stop would lose a step
    answers = answers_to(trainer, samples)
    if samples.rows is not None:
        trainer.written = scores_of_samples(samples, answers)
    if run.rank != 0:
        return
    lines = []
    for messages, answer in zip(samples.chats, answers, strict=True):
        prompt = tokenizer.decode(prompt_ids(messages, tokenizer, samples.template))
        *before, right = messages
        texts = {"split": samples.split, "messages": before, "prompt": prompt}
        texts |= {"reference": right["content"], "answer": answer}
        lines.append(json.dumps(texts, ensure_ascii=False) + "\n")
    write_whole(run.output_dir / SAMPLES, "".join(lines))


def scores_of_samples(samples: Samples, answers: Sequence[str], draws: int = RESAMPLES) -> Breakdown:
    """The scores of written answers, for whom they are; `draws` as of `break_down`."""
    from indictune.evaluation.breakdown import break_down
    from indictune.evaluation.sum_scores import written_answers

    references = [messages[-1]["content"] for messages in samples.chats]
    return break_down("written_answers", samples.facts(), written_answers(answers, references), draws=draws)


def answers_to(trainer: TaskTrainer, samples: Samples) -> list[str]:
    """What the model answers, in the order of the conversations. All ranks must call it."""
    tokenizer = trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    ends, answers = answer_ends(tokenizer, samples.template), []
    for messages in samples.chats:
        prompt = prompt_ids(messages, tokenizer, samples.template)
        answer = greedy(trainer, prompt, samples.max_new_tokens, ends)
        answers.append(cast(str, tokenizer.decode(answer, skip_special_tokens=True)))
    return answers


def greedy(trainer: TaskTrainer, prompt: list[int], max_new_tokens: int, ends: Collection[int]) -> list[int]:
    """The likeliest continuation, token by token, up to one of `ends`.

    `generate` would call the model inside peft's, but only a call of the outer model gathers sharded weights. Every
    rank computes the same, and takes rank 0's token so that all stop together.
    """
    model, device = trainer.model_wrapped, trainer.args.device
    model.eval()
    answer: list[int] = []
    tokens, cache = torch.tensor([prompt], device=device), None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        while len(answer) < max_new_tokens:
            OWN_PROGRESS.passed("writing samples")
            trainer.look_for_stop("the trained model wrote samples; going on writes them")
            # Without a mask, the attention for joined rows would ignore a layer's sliding window.
            mask = torch.ones(1, len(prompt) + len(answer), dtype=torch.long, device=device)
            if trainer.parallelism.pipeline is None:
                output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
                tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            else:  # a cache counts the tokens in the first layer, which other stages do not have
                inputs = {"input_ids": torch.tensor([prompt + answer], device=device), "attention_mask": mask}
                tokens = trainer.parallelism.compute(inputs, partial(_next_token, model, inputs)).to(device)
            OWN_PROGRESS.passed("computing a token of a sample")
            tokens = broadcast(tokens)
            if int(tokens) in ends:
                break
            answer.append(int(tokens))
    return answer


def _next_token(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    token: Tensor = model(**inputs, use_cache=False).logits[:, -1:].argmax(-1)
    return token
