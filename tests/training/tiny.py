"""A tiny LLaMA in a folder, rows of answers for it, and the trainer that trains it in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from indictune.config.arguments import Method, ModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_causal
from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.task_trainer import TaskTrainer
from tests.models.tiny import words_tokenizer

VOCABULARY = 64


def tiny_llama(folder: Path, vocab_size: int = VOCABULARY) -> str:
    """The folder of a LLaMA of 2 layers with random weights, large enough that documents differ in their logits."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words_tokenizer(None).save_pretrained(folder)
    return str(folder)


def answer_rows(*lengths: int, vocab_size: int = VOCABULARY) -> Dataset:
    """Rows of random tokens. The second half of each row is its answer."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    labels = [[-100] * ((len(row) + 1) // 2) + row[(len(row) + 1) // 2 :] for row in ids]
    languages = [("hi", "te", "ta")[index % 3] for index in range(len(ids))]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, "length": list(lengths), "language": languages})


def tiny_trainer(
    base: str, output_dir: Path, train: Dataset, validation: Dataset | None = None, **settings: Any
) -> LlamaTrainer:
    """A trainer whose one step takes all rows, by plain gradient descent.

    Args:
        base: from `tiny_llama`.
        output_dir: of the run.
        train: rows, or packs of rows.
        validation: rows for `evaluate`.
        settings: `padded`, and those of the model or of the training.
    """
    padded = settings.pop("padded", True)
    of_model = {name: settings.pop(name) for name in list(settings) if name in vars(ModelArguments())}
    method: Method = of_model.pop("method", "full")
    args = ModelArguments(base, method=method, dropout=0.0, **of_model)
    # With a fixed seed, because the matrices of an adapter are drawn.
    torch.manual_seed(0)
    tokenizer = load_tokenizer(args)
    model = load_causal(args, tokenizer, torch.float32, ends=[2])
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "logging_steps": 1,
        "disable_tqdm": True,
        "eval_strategy": "no",
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "global_batch_size": len(train),
        "per_device_train_batch_size": len(train),
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
    }
    training = LlamaTrainingArguments(output_dir=str(output_dir), **{**defaults, **settings})
    return LlamaTrainer(model, training, train, validation, tokenizer, padded)


def trained_weights(trainer: TaskTrainer) -> dict[str, torch.Tensor]:
    """A copy of the weights that are trained."""
    model: Any = trainer.model
    return {name: weights.detach().clone() for name, weights in model.named_parameters() if weights.requires_grad}
