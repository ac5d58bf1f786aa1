"""What a run of a LLaMA model is."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class LlamaTrainingArguments(IndicTrainingArguments):
    """How a language model is trained, with the defaults of TRL's `SFTConfig`."""

    learning_rate: float = flag(2e-5, "Peak learning rate. Default with --method lora or qlora: 2e-4.")
    gradient_checkpointing: bool = flag(
        True, "Compute activations again in the backward pass instead of keeping them."
    )
    bf16: bool | None = flag(None, "Compute in bf16. Default: yes, unless --fp16 is given.")  # type: ignore[assignment]
    activation_offloading: bool = flag(False, "Keep activations in CPU memory until the backward pass.")
    label_smoothing_factor: float = field(init=False, default=0.0)  # it would need all logits

    def __post_init__(self) -> None:
        if self.bf16 is None:
            self.bf16 = not self.fp16
        super().__post_init__()
