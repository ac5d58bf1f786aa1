"""What a run of a LLaMA model is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

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


_TASK = "Task of the recipe. A script of another task refuses it; `indictune train` picks the script by it."


@dataclass
class AlignedModelArguments(LlamaModelArguments):
    """`LlamaModelArguments` of a model that learns preferences: as in TRL (1.16), nothing is dropped."""

    lora_dropout: float = flag(0.0, "Dropout in front of the LoRA matrices. The reference is read without any.")
    dropout: float | None = flag(0.0, "Set every dropout of the model to this probability.")


@dataclass
class PairArguments(ChatDataArguments):
    """Which pairs of answers are trained on, and how they are read. The run records its task."""

    task: Literal["dpo"] | None = flag("dpo", _TASK)
    train_on_prompts: bool = field(init=False, default=False)  # both answers have the same prompt
    packing: bool = field(init=False, default=False)  # both conversations of a pair are joined


@dataclass
class RatedArguments(PairArguments):
    """The same for single answers that are marked good or bad."""

    task: Literal["kto"] | None = flag("kto", _TASK)  # type: ignore[assignment]


@dataclass
class RewardPairArguments(PairArguments):
    """The same for a reward model, which writes no answers."""

    task: Literal["reward"] | None = flag("reward", _TASK)  # type: ignore[assignment]
    num_sample_generations: int = field(init=False, default=0)
    max_new_tokens: int = field(init=False, default=256)


@dataclass
class AlignmentArguments(LlamaTrainingArguments):
    """How a language model learns preferences, with the defaults of TRL's `DPOConfig` and `KTOConfig`."""

    learning_rate: float = flag(1e-6, "Peak learning rate. Default with --method lora or qlora: 1e-5.")
    beta: float = flag(0.1, "How strongly the model is held to the model before training. Higher: closer to it.")


@dataclass
class PreferenceArguments(AlignmentArguments):
    """How a language model learns pairs of answers."""

    preference_loss: Literal["sigmoid", "ipo", "hinge", "robust"] = flag(
        "sigmoid", "Loss of a pair: sigmoid (DPO), ipo, hinge, or robust, for pairs of which some are swapped."
    )
    length_normalised: bool = flag(
        False, "Divide the log-probability of an answer by its tokens, so that length is no reward. ipo always does."
    )
    flipped_share: float = flag(0.0, "With --preference_loss robust, the share of pairs that are swapped, below 0.5.")
    sft_weight: float = flag(0.0, "Add this times the mean loss of the chosen answer's tokens to the loss of a pair.")


@dataclass
class RatedTrainingArguments(AlignmentArguments):
    """How a language model learns answers that are marked good or bad."""

    desirable_weight: float = flag(1.0, "Weight of the loss of a good answer.")
    undesirable_weight: float = flag(1.0, "Weight of the loss of a bad answer. Raise one if its kind is rarer.")


@dataclass
class RewardTrainingArguments(LlamaTrainingArguments):
    """How a reward model is trained, with the defaults of TRL's `RewardConfig`."""

    learning_rate: float = flag(1e-4, "Peak learning rate.")
    activation_offloading: bool = field(init=False, default=False)  # is TRL's
