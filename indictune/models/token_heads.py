"""A token classifier on Gemma 3, to whose texts transformers gives none. Importing this tells transformers of it."""

from transformers import AutoModelForTokenClassification, Gemma3TextConfig
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel


class Gemma3TextForTokenClassification(GenericForTokenClassification, Gemma3PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits [rows, tokens, labels] from the last states of Gemma 3, as transformers' classes for LLaMA and Qwen 3 do.

    A token sees those before it; with `use_bidirectional_attention` in the configuration, all of its row. Remove this
    when test_transformers_has_no_tagger_on_gemma_3 fails (transformers 5.23).
    """

    config: Gemma3TextConfig  # type: ignore[assignment]
    input_modalities = ("text",)  # type: ignore[assignment]


# Without `exist_ok`, transformers silently ignores a class for a configuration of its own.
AutoModelForTokenClassification.register(Gemma3TextConfig, Gemma3TextForTokenClassification, exist_ok=True)
