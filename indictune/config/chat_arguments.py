"""What a run of a LLaMA model is. A separate file, so that the run of a classifier does not import TRL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl.trainer.sft_config import SFTConfig

from indictune.config.arguments import IndicTrainingArguments, ModelArguments, SourceArguments
from indictune.config.shared_arguments import Checked, flag


@dataclass
class LlamaModelArguments(ModelArguments):
    """`ModelArguments` for a language model."""

    model_name_or_path: str = flag(
        "builtin:tiny-indic-llama",
        "A Hub name or a folder, or `builtin:tiny-indic-llama`, a small LLaMA that needs no network.",
    )


@dataclass
class ChatArguments(Checked):
    """How rows become the text of a language model."""

    columns: str | None = flag(
        None, "Rename columns of the file: `instruction=question,output=answer`. A recipe may have a mapping."
    )
    chat_template: str | None = flag(
        None,
        "How messages become text: llama3, llama2, chatml, tulu, plain or a .jinja file. By default the tokenizer's; "
        "`plain` for prompt and completion texts.",
    )
    train_on_prompts: bool = flag(False, "Compute the loss on all tokens, not only on those of the answers.")
    train_on_thinking: bool = flag(
        True, "Compute the loss on thoughts too: what the template writes from `<think>` to `</think>`."
    )
    max_length: int = flag(2048, "Cut rows to this many tokens. The number of cut rows is reported before training.")


@dataclass
class ChatDataArguments(ChatArguments, SourceArguments):
    """Which conversations are trained on, and how they are read."""

    packing: bool = flag(
        False, "Join several rows end to end into one of up to max_length tokens. Attention keeps them apart."
    )
    num_sample_generations: int = flag(
        0, "Let the trained model answer this many held-out rows: texts to samples.jsonl, chrF to evaluation.json."
    )
    max_new_tokens: int = flag(256, "Most tokens of such an answer.")


@dataclass
class LlamaTrainingArguments(IndicTrainingArguments, SFTConfig):
    """TRL's `SFTConfig` with other defaults, without the fields that prepare rows: it gets tokens and labels."""

    learning_rate: float = flag(2e-5, "Peak learning rate. Default with --method lora or qlora: 2e-4.")
    gradient_checkpointing: bool = flag(
        True, "Compute activations again in the backward pass instead of keeping them."
    )
    bf16: bool | None = flag(None, "Compute in bf16. Default: yes, unless --fp16 is given.")  # type: ignore[assignment]
    activation_offloading: bool = flag(False, "Keep activations in CPU memory until the backward pass.")

    # Not flags: rows and models are complete before TRL gets them.
    model_init_kwargs: None = field(init=False, default=None)
    trust_remote_code: bool = field(init=False, default=False)
    router_aux_loss_coef: float = field(init=False, default=0.0)  # it depends on how a batch is split
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
    label_smoothing_factor: float = field(init=False, default=0.0)  # it would need all logits
