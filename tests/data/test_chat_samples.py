"""The built-in chats: enough of them, in the language they name, apart from each other, and short."""

from __future__ import annotations

import importlib.resources
import json
import unicodedata
from collections import Counter
from functools import cache
from typing import TypedDict

import pytest

from indictune.data.chat.messages import Message, messages_of

SPLITS = {"train": 272, "validation": 40, "test": 40}
SCRIPTS = {"hi": "DEVANAGARI", "te": "TELUGU", "ta": "TAMIL", "en": "LATIN"}
PAIRS = [("train", "validation"), ("train", "test"), ("validation", "test")]

TRANSLATION = ("translat", "अनुवाद", "అనువ", "மொழிபெயர்")
# The names of each language in the four, without their endings.
NAMES = {
    "hi": ("Hindi", "हिन्दी", "హిందీ", "இந்தி"),
    "te": ("Telugu", "तेलुगु", "తెలుగు", "தெலுங்க"),
    "ta": ("Tamil", "तमिल", "తమిళ", "தமிழ"),
    "en": ("English", "अंग्रेज़ी", "ఇంగ్లీషు", "ஆங்கில"),
}


class Chat(TypedDict):
    messages: list[Message]
    language: str


@cache
def chats(split: str) -> list[Chat]:
    folder = importlib.resources.files("indictune.data").joinpath("samples", "chats")
    return [json.loads(line) for line in folder.joinpath(f"{split}.jsonl").read_text("utf-8").splitlines()]


def all_chats() -> list[Chat]:
    return [chat for split in SPLITS for chat in chats(split)]


def prompts(chat: Chat) -> list[str]:
    return [message["content"] for message in chat["messages"] if message["role"] == "user"]


def turns(chat: Chat) -> list[tuple[str, str]]:
    """Each prompt with its answer."""
    contents = [message["content"] for message in chat["messages"] if message["role"] != "system"]
    return list(zip(contents[::2], contents[1::2], strict=True))


def script_of(text: str) -> str:
    """The script that most letters of a text are of: the first word of their names."""
    scripts = Counter(unicodedata.name(char).split()[0] for char in text if char.isalpha())
    return scripts.most_common(1)[0][0]


def is_romanised(chat: Chat) -> bool:
    return chat["language"] != "en" and script_of("".join(prompts(chat))) == "LATIN"


@pytest.mark.parametrize(("split", "count"), SPLITS.items())
def test_every_split_holds_the_four_languages_in_equal_parts(split: str, count: int) -> None:
    counts = Counter(chat["language"] for chat in chats(split))
    assert counts == dict.fromkeys(SCRIPTS, count // 4)


def test_every_chat_is_messages_by_turns_and_a_language() -> None:
    for chat in all_chats():
        row = dict(chat)
        assert row.keys() == {"messages", "language"}
        assert messages_of(row) == chat["messages"]


@pytest.mark.parametrize("split", SPLITS)
def test_some_chats_of_every_split_have_a_system_message_and_some_several_turns(split: str) -> None:
    system = [chat["messages"][0]["role"] == "system" for chat in chats(split)]
    several = [len(turns(chat)) for chat in chats(split)]
    assert 0.12 <= sum(system) / len(system) <= 0.18
    assert 0.12 <= sum(count > 1 for count in several) / len(several) <= 0.18
    assert max(several) <= 3


@pytest.mark.parametrize("split", SPLITS)
def test_some_chats_of_every_split_are_romanised_and_most_are_not(split: str) -> None:
    counts = Counter(chat["language"] for chat in chats(split) if is_romanised(chat))
    assert counts.keys() == {"hi", "te", "ta"}
    assert max(counts.values()) <= len(chats(split)) / 4 / 5


def test_every_message_is_in_its_language_but_for_translations() -> None:
    """The answer to a prompt for a translation is in a language that the prompt names."""
    for chat in all_chats():
        own = "LATIN" if is_romanised(chat) else SCRIPTS[chat["language"]]
        assert {script_of(message["content"]) for message in chat["messages"] if message["role"] == "system"} <= {own}
        for prompt, answer in turns(chat):
            assert script_of(prompt) == own, prompt
            expected = {own}
            if any(word in prompt.lower() for word in TRANSLATION):
                expected = {SCRIPTS[name] for name in NAMES if any(word in prompt for word in NAMES[name])}
            assert script_of(answer) in expected, (prompt, answer)


def test_texts_are_nfc_and_without_blanks_around_them() -> None:
    for chat in all_chats():
        for message in chat["messages"]:
            content = message["content"]
            assert content
            assert content == unicodedata.normalize("NFC", content).strip()


def test_prompts_have_up_to_40_words_and_answers_5_to_50() -> None:
    for chat in all_chats():
        for message in chat["messages"]:
            words = len(message["content"].split())
            assert (5 <= words <= 50) if message["role"] == "assistant" else (1 <= words <= 40), message["content"]


def folded(text: str) -> str:
    return " ".join(text.casefold().split())


def test_no_chat_begins_like_another() -> None:
    counts = Counter(folded(prompts(chat)[0]) for chat in all_chats())
    assert [prompt for prompt, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_no_prompt_stands_in_two_splits(left: str, right: str) -> None:
    here, there = ({folded(text) for chat in chats(split) for text in prompts(chat)} for split in (left, right))
    assert here & there == set()


def four_grams(text: str) -> frozenset[str]:
    text = folded(text)
    return frozenset(text[start : start + 4] for start in range(max(1, len(text) - 3)))


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_no_prompt_of_a_split_is_nearly_one_of_another(left: str, right: str) -> None:
    """Nearly: at least half of the character 4-grams of the two are common to both (Jaccard)."""
    there = [(four_grams(text), text) for chat in chats(right) for text in prompts(chat)]
    for text in (text for chat in chats(left) for text in prompts(chat)):
        grams = four_grams(text)
        for other_grams, other in there:
            common = len(grams & other_grams)
            assert 2 * common < len(grams) + len(other_grams) - common, (text, other)
