"""A model that cannot be read is told in one message that names what was typed and what to type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.models.classifier import check_classifier, load_classifier, load_classifier_config, load_trained
from indictune.models.load import load_tokenizer
from indictune.models.load_errors import explanation
from tests.models.tiny import words_tokenizer

NAME = "some-org/some-model"


def told(args: ModelArguments) -> str:
    """The one message for this model; the same for its configuration and its tokenizer."""
    messages = set()
    for load in (load_classifier_config, load_tokenizer):
        with pytest.raises(UserError) as caught:
            load(args)
        assert len(caught.value.problems) == 1
        messages.add(caught.value.message)
    assert len(messages) == 1
    return messages.pop()


def hub_error(kind: type[HfHubHTTPError]) -> OSError:
    """An error of the Hub as transformers passes it on."""
    error = OSError("transformers' own words")
    error.__cause__ = kind("401", response=httpx2.Response(401, request=httpx2.Request("HEAD", "https://hub")))
    return error


def test_a_name_that_is_not_here_while_there_is_no_network() -> None:
    message = told(ModelArguments(NAME))
    assert message.startswith(f"--model_name_or_path {NAME}: not a folder here, not in the local Hub cache")
    assert "the Hub cannot be reached" in message


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    assert told(ModelArguments(str(missing))).startswith(f"--model_name_or_path {missing}: there is no such folder.")
    assert "there is no such folder" in told(ModelArguments("./gone"))
    assert "there is no such folder" in told(ModelArguments("runs/first/checkpoint-10"))


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"hidden_act": "evil"}, "KeyError: 'evil'"),
        ({"hidden_size": 33}, "The hidden size (33) is not a multiple of the number of attention heads"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
        ({"id2label": ["a", "b"]}, "AttributeError: 'list' object has no attribute 'items'"),
        ({"model_type": ["bert"]}, "TypeError: unhashable type: 'list'"),
        ({"quantization_config": "x"}, "AttributeError: 'str' object has no attribute 'to_dict'"),
    ],
)
@pytest.mark.parametrize("by_its_names", [False, True])
def test_a_configuration_that_makes_no_model_is_told_with_the_reason(
    saved: Callable[[str], str], by_its_names: bool, setting: dict[str, object], told: str
) -> None:
    """When its weights are read, or before, where an adapter names its modules."""
    args = ModelArguments(saved("bert"), method="lora", lora_target_modules=["query"])
    path = Path(args.model_name_or_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))

    def read() -> None:
        if by_its_names:
            check_classifier(args, load_classifier_config(args))
        else:
            load_classifier(args, ["a", "b"], words_tokenizer())

    with pytest.raises(UserError) as caught:
        read()
    assert caught.value.message.startswith(
        f"--model_name_or_path {args.model_name_or_path}: the folder's files cannot be read as a model. ("
    )
    assert told in caught.value.message


def test_a_folder_without_a_model_names_the_one_inside(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10").mkdir()
    (tmp_path / "checkpoint-10" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    message = told(ModelArguments(str(tmp_path)))
    assert f"--model_name_or_path {tmp_path}: the folder has no config.json" in message
    assert message.endswith(f"There is one in {tmp_path / 'checkpoint-10'}.")


def test_a_configuration_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="the folder's files cannot be read as a model"):
        load_classifier_config(ModelArguments(str(tmp_path)))


def test_an_architecture_that_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(UserError, match=r"cannot be read as a model\. \(.*abacus"):
        load_classifier_config(ModelArguments(str(tmp_path)))


@pytest.mark.parametrize("content", [None, b"not weights"])
def test_weights_that_are_missing_or_broken(saved: Callable[[str], str], content: bytes | None) -> None:
    folder = Path(saved("bert"))
    (folder / "model.safetensors").unlink()
    if content is not None:
        (folder / "model.safetensors").write_bytes(content)
    args = ModelArguments(str(folder))
    with pytest.raises(UserError, match=f"--model_name_or_path {folder}: the folder's files cannot be read"):
        load_classifier(args, ["no", "yes"], words_tokenizer())
    with pytest.raises(UserError, match=f"--model {folder}: the folder's files cannot be read"):
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
    with pytest.raises(UserError, match=f"--model_name_or_path {folder}: the folder's files cannot be read"):
        load_tokenizer(ModelArguments(folder))


def test_a_model_with_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "abacus", "auto_map": {"AutoConfig": "configuration_abacus.Config"}}'
    )
    with pytest.raises(UserError, match="give --trust_remote_code true"):
        load_classifier_config(ModelArguments(str(tmp_path)))


def test_a_gated_model_tells_where_to_ask_and_how_to_log_in() -> None:
    message = explanation(ModelArguments(NAME), hub_error(GatedRepoError))
    assert "gated" in message
    assert f"https://huggingface.co/{NAME}" in message
    assert "set HF_TOKEN or run `hf auth login`" in message


def test_a_model_that_the_hub_does_not_have() -> None:
    message = explanation(ModelArguments(NAME), hub_error(RepositoryNotFoundError))
    assert f"--model_name_or_path {NAME}: neither a folder nor a model on the Hub" in message
    assert "hf auth login" in message


def test_a_revision_that_the_model_does_not_have() -> None:
    args = ModelArguments(NAME, model_revision="v9")
    message = explanation(args, hub_error(RevisionNotFoundError))
    assert message == f"--model_revision v9: {NAME} has no branch, tag or commit v9."
    base = explanation(args, hub_error(RevisionNotFoundError), flag="The base")
    assert base == f"The base {NAME}: it has no branch, tag or commit v9."
