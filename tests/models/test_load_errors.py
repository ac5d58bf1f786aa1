"""A model that cannot be read is reported as one problem, with its code and flag."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import AutoModelForSequenceClassification

from indictune.config.arguments import ModelArguments
from indictune.config.recipe import configuration_of
from indictune.errors import Problem, UserError
from indictune.files import json_or_nothing
from indictune.models.adapters import HEAD_NAMES
from indictune.models.config_shapes import meta_model
from indictune.models.load import load_tokenizer, load_trained
from indictune.models.task_models import check_shapes, load_classifier, load_classifier_config
from indictune.models.trusted_files import load_problem
from tests.models.tiny import words_tokenizer
from tests.refusals import refused

NAME = "some-org/some-model"


def problem_of(args: ModelArguments) -> Problem:
    """The one problem of reading this model; the same for its configuration and its tokenizer."""
    found: set[Problem] = set()
    for load in (load_classifier_config, load_tokenizer):
        with pytest.raises(UserError) as caught:
            load(args)
        found.update(caught.value.problems)
    assert len(found) == 1
    problem = found.pop()
    assert problem.flag == "--model_name_or_path"
    return problem


def hub_error(kind: type[HfHubHTTPError]) -> OSError:
    """An error of the Hub as transformers passes it on."""
    error = OSError("transformers' own words")
    error.__cause__ = kind("401", response=httpx2.Response(401, request=httpx2.Request("HEAD", "https://hub")))
    return error


def test_a_name_that_is_not_here_while_there_is_no_network() -> None:
    assert problem_of(ModelArguments(NAME)).code == "model-not-found-offline"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    for path in (str(tmp_path / "gone"), "./gone", "runs/first/checkpoint-10"):
        assert problem_of(ModelArguments(path)).code == "no-such-model-folder"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"hidden_act": "evil"}, "KeyError: 'evil'"),
        ({"hidden_size": 33}, "The hidden size (33) is not a multiple of the number of attention heads"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
        ({"id2label": ["a", "b"]}, "AttributeError: 'list' object has no attribute 'items'"),
        ({"model_type": ["bert"]}, "TypeError: unhashable type: 'list'"),
        ({"num_attention_heads": 0}, "num_attention_heads of its config.json is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers of its config.json is -1"),
        ({"vocab_size": 10**15}, "vocab_size of its config.json is 1000000000000000"),
        ({"threshold": "half"}, "threshold of its config.json is 'half'"),
        ({"architectures": [1]}, "architectures of its config.json is [1]"),
        ({"pad_token_id": 10**9}, "AssertionError: Padding_idx"),
        ({"quantization_config": "x"}, "AttributeError: 'str' object has no attribute 'to_dict'"),
    ],
)
@pytest.mark.parametrize("by_its_names", [False, True])
def test_a_broken_configuration_is_reported_with_the_reason(
    saved: Callable[[str], str], by_its_names: bool, setting: dict[str, object], reason: str
) -> None:
    """When its weights are read, or before, where an adapter names its modules."""
    args = ModelArguments(saved("bert"), method="lora", lora_target_modules=["query"])
    path = Path(args.model_name_or_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))

    def read() -> None:
        if by_its_names:
            check_shapes(AutoModelForSequenceClassification, args, load_classifier_config(args), HEAD_NAMES)
        else:
            load_classifier(args, ["a", "b"], words_tokenizer())

    with refused("model-unreadable", reason, flag="--model_name_or_path"):
        read()


def test_a_configuration_that_no_model_can_be_made_from_is_reported_before_weights_are_read(
    saved: Callable[[str], str],
) -> None:
    args = ModelArguments(saved("bert"))
    config = load_classifier_config(args)
    config.hidden_act = "evil"
    with refused("model-unreadable", "KeyError: 'evil'", flag="--model_name_or_path"):
        meta_model(args, config, "ForSequenceClassification")


def test_brackets_without_end_are_reported(saved: Callable[[str], str]) -> None:
    """They raise RecursionError, where YAML and JSON are read."""
    folder, brackets = Path(saved("bert")), "[" * 20_000
    (folder / "recipe.yaml").write_text(f"seed: {brackets}")
    with refused("unreadable", "recipe.yaml", "nested too deeply", flag="--model"):
        configuration_of(folder)
    (folder / "model.safetensors.index.json").write_text(f'{{"a": {brackets}')
    with refused("index-unreadable"):
        load_classifier(ModelArguments(str(folder)), ["a", "b"], words_tokenizer())
    (folder / "config.json").write_text(f'{{"a": {brackets}')
    assert problem_of(ModelArguments(str(folder))).code == "model-unreadable"
    assert json_or_nothing(folder / "config.json") == {}


def test_a_folder_without_a_model_names_the_one_inside(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    problem = problem_of(ModelArguments(str(tmp_path)))
    assert problem.code == "folder-without-model"
    assert f"There is one in {tmp_path / 'checkpoint-10'}." in str(problem)


def test_a_configuration_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with refused("model-unreadable"):
        load_classifier_config(ModelArguments(str(tmp_path)))


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with refused("model-unreadable", "abacus"):
        load_classifier_config(ModelArguments(str(tmp_path)))


@pytest.mark.parametrize("content", [None, b"not weights"])
def test_weights_that_are_missing_or_broken(saved: Callable[[str], str], content: bytes | None) -> None:
    folder = Path(saved("bert"))
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    args = ModelArguments(str(folder))
    code = "weights-not-found" if content is None else "model-unreadable"
    with refused(code, str(folder), flag="--model_name_or_path"):
        load_classifier(args, ["no", "yes"], words_tokenizer())
    with refused(code, str(folder), flag="--model"):
        load_trained(folder)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_object": "x"},
        {"tokenizer_object": {"model": 1}},
        {"tokenizer_class": 7},
        {"tokenizer_class": ["BertTokenizer"]},
        {"added_tokens_decoder": 3},
        {"added_tokens_decoder": {"a": {"content": []}}},
        {"model_max_length": [], "pad_token": {"a": 1}},
        {"extra_special_tokens": 4},
        [],
    ],
)
def test_a_tokenizer_with_hostile_settings_is_one_message(
    saved: Callable[[str], str], settings: dict[str, object] | list[object]
) -> None:
    folder = saved("bert")
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with refused("model-unreadable", str(folder), flag="--model_name_or_path"):
        load_tokenizer(ModelArguments(folder))


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "abacus", "auto_map": {"AutoConfig": "configuration_abacus.Config"}}'
    )
    with refused("model-needs-its-code"):
        load_classifier_config(ModelArguments(str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (GatedRepoError, "model-gated"),
        (RepositoryNotFoundError, "no-such-model"),
        (RevisionNotFoundError, "no-such-revision"),
    ],
)
def test_what_the_hub_refuses_has_its_own_code(kind: type[HfHubHTTPError], code: str) -> None:
    problem = load_problem(ModelArguments(NAME, model_revision="v9"), hub_error(kind))
    assert (problem.code, problem.flag, problem.value) == (code, "--model_name_or_path", NAME)
    assert ("v9" in str(problem)) is (code == "no-such-revision")
