"""`samples.jsonl`: answers of the trained model beside the references."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import torch
from accelerate.utils import broadcast
from transformers import PreTrainedTokenizerBase

from indictune.data.chat_tokens import answer_ends, prompt_ids
from indictune.data.messages import Message
from indictune.files import write_whole
from indictune.progress import HERE
from indictune.run import Run
from indictune.train.exact_trainer import ExactTrainer


def write_samples(
    trainer: ExactTrainer, run: Run, chats: Sequence[Sequence[Message]], template: str, max_new_tokens: int
) -> None:
    """Let the trained model answer conversations. All ranks must call it: each may hold a part of the weights.

    Writes one JSON object a row: `prompt` (text, as the model reads it), `reference` and `answer`.

    Args:
        trainer: after training.
        run: its folder gets the file.
        chats: the last answer of each is the reference. Without any, no file is written.
        template: writes them out.
        max_new_tokens: of an answer, at most.

    Raises:
        Stopped: a rank was asked to stop, and going on need not train again.
    """
    if not chats:
        return
    tokenizer = trainer.processing_class
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    ends, lines = answer_ends(tokenizer, template), []
    trainer.asked_before = None  # in training, where a step would be lost otherwise
    for messages in chats:
        prompt = prompt_ids(messages, tokenizer, template)
        answer = greedy(trainer, prompt, max_new_tokens, ends)
        texts = {
            "prompt": tokenizer.decode(prompt),
            "reference": messages[-1]["content"],
            "answer": tokenizer.decode(answer, skip_special_tokens=True),
        }
        lines.append(json.dumps(texts, ensure_ascii=False) + "\n")
    if run.rank == 0:
        write_whole(run.output_dir / "samples.jsonl", "".join(lines))


def greedy(trainer: ExactTrainer, prompt: list[int], max_new_tokens: int, ends: Collection[int]) -> list[int]:
    """The likeliest continuation, token by token, up to one of `ends`.

    Not `generate`: it calls the model below peft's, whose split weights are gathered only by a call from the top.
    Every rank computes the same, and takes rank 0's token so that all stop together.
    """
    model, device = trainer.model_wrapped, trainer.args.device
    model.eval()
    answer: list[int] = []
    tokens, cache = torch.tensor([prompt], device=device), None
    with torch.no_grad(), trainer.compute_loss_context_manager():
        while len(answer) < max_new_tokens:
            HERE.passed("writing samples")
            trainer.look_for_stop("the trained model wrote samples; going on writes them")
            # Without a mask, attention over joined rows takes a window that a layer has for none.
            mask = torch.ones(1, len(prompt) + len(answer), dtype=torch.long, device=device)
            output = model(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True)
            HERE.passed("computing a token of a sample")
            tokens = broadcast(output.logits[:, -1:].argmax(-1))
            cache = output.past_key_values
            if int(tokens) in ends:
                break
            answer.append(int(tokens))
    return answer
