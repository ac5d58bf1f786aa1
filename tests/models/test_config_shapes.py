"""What is refused by a model's shapes alone; the names of an adapter's modules are in test_causal and test_sources."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoConfig

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.classifier import check_classifier, load_classifier_config


class TestAttention:
    def refusal(self, folder: str, attention: str) -> str:
        args = ModelArguments(folder, attn_implementation=attention)
        with pytest.raises(UserError) as caught:
            check_classifier(args, load_classifier_config(args))
        return caught.value.message

    @pytest.mark.parametrize("attention", ["eager", "sdpa", "flex_attention", "paged|eager"])
    def test_what_transformers_takes_is_taken(self, saved: Callable[[str], str], attention: str) -> None:
        args = ModelArguments(saved("bert"), attn_implementation=attention)
        config = load_classifier_config(args)
        before = config.to_dict()
        check_classifier(args, config)
        assert config.to_dict() == before
        assert config._attn_implementation is None

    def test_a_name_that_is_none_is_told_with_those_that_the_model_has(self, saved: Callable[[str], str]) -> None:
        told = self.refusal(folder := saved("bert"), "spda")
        assert told.startswith(f"--attn_implementation spda: {folder} cannot be read with it. (Specified `attn_impl")
        assert 'attn_implementation="eager"' in told
        assert "attn_implementation=sdpa" in told
        assert told.endswith(") Give another, or leave it out for the model's own.")

    @pytest.mark.parametrize(
        ("attention", "module", "told"),
        [
            ("flash_attention_2", "flash_attn", "The package is flash-attn. Give another"),
            ("flash_attention_3", "flash_attn_interface", "The package is flash-attn-3. Give another"),
            ("kernels-community/flash-attn", "kernels", "e.g. `pip install kernels=="),
        ],
    )
    def test_a_package_that_is_missing_is_named(
        self, saved: Callable[[str], str], attention: str, module: str, told: str
    ) -> None:
        if find_spec(module) is not None:
            pytest.skip(f"{module} is installed")
        assert told in self.refusal(saved("bert"), attention)

    def test_what_a_model_does_not_support_is_refused(self, tmp_path: Path) -> None:
        AutoConfig.for_model("mpnet").save_pretrained(tmp_path)
        assert "MPNetForSequenceClassification does not support" in self.refusal(str(tmp_path), "sdpa")

    def test_a_configuration_that_makes_no_model_is_not_laid_to_it(self, saved: Callable[[str], str]) -> None:
        path = Path(folder := saved("bert")) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 33}))
        told = self.refusal(folder, "spda")
        assert told.startswith(
            f"--model_name_or_path {folder}: the folder's files cannot be read as a model. (The hid"
        )
