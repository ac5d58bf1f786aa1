"""What a run of a LLaMA model is. Beside `config.arguments.py`, so that a classifier's run does not import TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.sft_config import SFTConfig

from indictune.config.arguments import IndicTrainingArguments, ModelArguments, SourceArguments
from indictune.errors import Problems, UserError, problem


@dataclass
class LlamaModelArguments(ModelArguments):
    """`ModelArguments` for a language model.

    Raises:
        UserError: a value is out of its range.
    """

    model_name_or_path: str = field(
        default="builtin:tiny-indic-llama",
        metadata={"help": "A Hub name or a folder, or `builtin:tiny-indic-llama`, a small LLaMA without network."},
    )


@dataclass
class ChatArguments:
    """How the rows of a file become what a language model reads and answers.

    Raises:
        UserError: a value is out of its range.
    """

    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "How messages are written out: llama3, llama2, chatml, plain, or a .jinja file that marks the "
            "answers. Default: the tokenizer's own; `plain` for prompt and completion texts."
        },
    )
    train_on_prompts: bool = field(
        default=False, metadata={"help": "Let the loss count every token, not those of the answers alone."}
    )
    max_length: int = field(
        default=2048, metadata={"help": "Rows are cut to this many tokens; how many were cut is told before training."}
    )

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise UserError("max-length-too-small", "--max_length", self.max_length, smallest=2)


@dataclass
class ChatDataArguments(ChatArguments, SourceArguments):
    """Which conversations are trained on, and how they are read.

    Raises:
        UserError: a value is out of its range, or no training rows are named.
    """

    packing: bool = field(
        default=False,
        metadata={"help": "Put several rows end to end into one of up to max_length tokens, kept apart in attention."},
    )
    num_sample_generations: int = field(
        default=0, metadata={"help": "Write this many answers of the trained model to samples.jsonl."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Length of those answers at most, in tokens."})

    def __post_init__(self) -> None:
        problems = Problems()
        with problems.collecting():
            ChatArguments.__post_init__(self)
        with problems.collecting():
            SourceArguments.__post_init__(self)
        for name, smallest in (("num_sample_generations", 0), ("max_new_tokens", 1)):
            if (value := getattr(self, name)) < smallest:
                problems.append(problem("expected-at-least", f"--{name}", value, smallest=smallest))
        problems.raise_any()


@dataclass
class LlamaTrainingArguments(IndicTrainingArguments, SFTConfig):
    """TRL's `SFTConfig` with our defaults, without the fields that say how rows are prepared.

    Rows are read, written out, cut and packed by `ChatDataArguments`; TRL gets tokens and labels.
    """

    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate. 2e-4 is usual for adapters."})
    gradient_checkpointing: bool = field(
        default=True, metadata={"help": "Compute activations again in the backward pass instead of keeping them."}
    )
    bf16: bool | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Compute in bf16. Default: yes, unless --fp16 is given."}
    )
    activation_offloading: bool = field(
        default=False, metadata={"help": "Keep activations in the CPU's memory until the backward pass."}
    )

    # Not flags: what TRL would do to rows and models is done before it gets them.
    model_init_kwargs: None = field(init=False, default=None)
    trust_remote_code: bool = field(init=False, default=False)
    router_aux_loss_coef: float = field(init=False, default=0.0)  # of a micro-batch's own means, for all of its tokens
    chat_template_path: None = field(init=False, default=None)
    dataset_text_field: str = field(init=False, default="text")
    dataset_kwargs: dict[str, Any] | None = field(init=False, default_factory=lambda: {"skip_prepare_dataset": True})
    dataset_num_proc: None = field(init=False, default=None)
    eos_token: None = field(init=False, default=None)
    max_length: None = field(init=False, default=None)
    truncation_mode: str = field(init=False, default="keep_start")
    shuffle_dataset: bool = field(init=False, default=False)
    packing: bool = field(init=False, default=False)
    packing_strategy: str = field(init=False, default="bfd")
    padding_free: bool = field(init=False, default=False)
    pad_to_multiple_of: None = field(init=False, default=None)
    eval_packing: None = field(init=False, default=None)
    completion_only_loss: None = field(init=False, default=None)
    assistant_only_loss: bool = field(init=False, default=False)
    loss_type: str = field(init=False, default="nll")
    pad_token: None = field(init=False, default=None)
    label_smoothing_factor: float = field(init=False, default=0.0)  # TRL would need the whole logits for it
