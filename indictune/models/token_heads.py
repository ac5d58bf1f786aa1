"""A token classifier on Gemma 3, to whose texts transformers gives none."""

import transformers
from transformers import AutoModelForTokenClassification, PreTrainedConfig
from transformers.modeling_layers import GenericForTokenClassification
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel


class Gemma3TextConfig(transformers.Gemma3TextConfig):  # type: ignore[no-untyped-call]
    """The configuration by which transformers finds the classifier, and by its name its own other classes.

    Registered for transformers' own configuration, the classifier would win over the code of a model that brings some.
    """


class Gemma3TextForTokenClassification(GenericForTokenClassification, Gemma3PreTrainedModel):  # type: ignore[no-untyped-call]
    """Logits [rows, tokens, labels] from the last states of Gemma 3, as transformers' classes for LLaMA and Qwen 3 do.

    A token sees those before it; with `use_bidirectional_attention` in the configuration, all of its row. Remove this
    when test_transformers_has_no_tagger_on_gemma_3 fails (transformers 5.23).
    """

    config: Gemma3TextConfig  # type: ignore[assignment]
    config_class = Gemma3TextConfig
    input_modalities = ("text",)  # type: ignore[assignment]


AutoModelForTokenClassification.register(Gemma3TextConfig, Gemma3TextForTokenClassification, exist_ok=True)


def taggable(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of Gemma 3's texts, for which there is a token classifier then."""
    config.__class__ = Gemma3TextConfig
    return config
