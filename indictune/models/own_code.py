"""Models whose files bring Python code: whether it is what their configuration means, and heads of ours on it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.trusted_files import own_classes

_HEADS: Mapping[str, tuple[Any, type[Any]]] = {
    "ForSequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),
    "ForTokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),
}


def runs_own_code(model: nn.Module) -> bool:
    """Whether the model runs Python code that came with its files, with the user's permission."""
    # FSDP2 replaces the class of a sharded model by a subclass.
    own = getattr(model, "get_base_model", lambda: model)()
    return any(each.__module__.startswith("transformers_modules") for each in type(own).__mro__)


def with_own_code(config: PreTrainedConfig, args: ModelArguments, path: str, flag: str) -> PreTrainedConfig:
    """A configuration that means a class of its own code, with heads for texts and tokens on that code's base.

    IndicBERT v3 has Gemma 3's configuration and a class that lets tokens see each other in both directions. By its
    configuration alone, transformers (5.23) would load causal Gemma 3, with `trust_remote_code` too, because the code
    has no classifier. Code whose class has the name of one of transformers is a copy of that, in most repositories.

    Args:
        path: of the model: a folder, or a name on the Hub.

    Raises:
        UserError: `model-means-its-code` or, without code, `model-class-unknown`.
    """
    own, named = own_classes(config), list(map(str, config.architectures or ()))
    details = {"classes": ", ".join(named or own.values()), "model_type": config.model_type}
    if not own:
        example = getattr(MODEL_MAPPING.get(type(config), None), "__name__", "BertModel")
        raise UserError("model-class-unknown", flag, args.model_name_or_path, **details, example=example)
    if not args.trust_remote_code:
        raise UserError("model-means-its-code", flag, args.model_name_or_path, **details)
    others = {name for name, named in own.items() if f"{_HEADS_MODULE}." not in named}
    if "AutoModel" in own and not others & {f"AutoModel{name}" for name in _HEADS}:
        base = get_class_from_dynamic_module(own["AutoModel"], path, revision=args.model_revision)
        # The code that ran is saved with the model, so that a later version of the repository changes nothing.
        config.auto_map = {name: str(named).rpartition("--")[2] for name, named in config.auto_map.items()}
        config.__class__ = _registered(cast(Any, type(config)), base)
    return config


@cache
def _registered(config_class: Any, base: Any) -> Any:
    """A configuration class by which transformers finds the base, and heads on it as those that it has for LLaMA."""
    own_config: Any = type(f"{base.__name__}Config", (config_class,), {"__module__": base.__module__})
    about = {"__module__": base.__module__, "config_class": own_config}
    AutoModel.register(own_config, type(base.__name__, (base,), about))
    family = next(each for each in base.__mro__ if PreTrainedModel in each.__bases__)
    for name, (auto, generic) in _HEADS.items():
        auto.register(own_config, type(base.__name__ + name, (SavesCode, generic, family), about | {"code_of": base}))
    return own_config


class SavesCode:
    """A head that is saved with its base's code and its own, so that transformers alone reads it as it was trained."""

    code_of: type[Any]
    config: PreTrainedConfig

    def save_pretrained(self, save_directory: Any, **settings: Any) -> None:
        """As transformers' method."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.save_code(save_directory)
        super().save_pretrained(save_directory, **settings)  # type: ignore[misc]

    def save_code(self, folder: str | Path) -> None:
        """Write the code into an existing folder, and name it in the configuration."""
        custom_object_save(self.code_of, folder)
        base, module = self.code_of.__name__, self.code_of.__module__.rpartition(".")[2]
        code = _HEADS_CODE.format(base=base, module=module)
        (Path(folder) / f"{_HEADS_MODULE}.py").write_text(code, encoding="utf-8")
        own = {f"AutoModel{name}": f"{_HEADS_MODULE}.{base}{name}" for name in _HEADS}
        self.config.auto_map = {**own, **self.config.auto_map}


_HEADS_MODULE = "heads_on_own_code"
_HEADS_CODE = '''\
"""Heads on {base}, written by indictune."""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from .{module} import {base}

_FAMILY = next(each for each in {base}.__mro__ if PreTrainedModel in each.__bases__)


def _begin(model, config):
    _FAMILY.__init__(model, config)
    model.num_labels = config.num_labels
    setattr(model, model.base_model_prefix, {base}(config))


class {base}ForSequenceClassification(GenericForSequenceClassification, _FAMILY):
    config_class = {base}.config_class

    def __init__(self, config):
        _begin(self, config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class {base}ForTokenClassification(GenericForTokenClassification, _FAMILY):
    config_class = {base}.config_class

    def __init__(self, config):
        _begin(self, config)
        given = [getattr(config, name, None) for name in ("classifier_dropout", "hidden_dropout")]
        self.dropout = nn.Dropout(next((each for each in given if each is not None), 0.1))
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()
'''
