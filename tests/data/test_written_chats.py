"""Answers of templates without marks: found turn by turn, the same as marks would find, or refused."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.bad_rows import BadRows
from indictune.data.chat.chat_tokens import (
    NOT_THINKING,
    answer_ends,
    choose_template,
    prompt_ids,
    template_notes,
    tokenised_chats,
)
from indictune.data.chat.conversations import Conversations
from indictune.data.chat.messages import Message
from indictune.data.chat.prepare_chats import set_template, tokenise_chat_splits
from indictune.errors import UserError
from indictune.training.evaluation import greedy
from tests.data.chats import load, tokenise_chats
from tests.data.published_templates import AIRAVATA, DROPS_TURNS, LLAMA_3_2, NOT_A_PREFIX, PUBLISHED, QWEN_3, SARVAM_M
from tests.data.test_chat_tokens import TEMPLATES, TURNS, byte_level_tokenizer, chat, rows
from tests.models.tiny import WORDS, words_tokenizer
from tests.problems import problems_raised, summaries
from tests.training.tiny import tiny_llama, tiny_trainer

UNLIKE_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
TWO_TURNS, SYSTEM = chat(("Q1", "A1"), ("Q2", "A2")), "S"


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<start_of_turn>", "<end_of_turn>", "<think>", "</think>"])
    tokenizer.chat_template = template
    return tokenizer


def learned(
    tokenizer: PreTrainedTokenizerBase, *chats: list[Message], max_length: int = 1000, thinking: bool = True
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """The text of each row with the answers that the loss counts there, and the remarks of the run."""
    bad, given = BadRows("t.jsonl"), rows(*chats)
    template = choose_template(tokenizer, None, False, False)
    settings = tokenizer, template, max_length, False, bad
    found = []
    for batch in tokenised_chats(given.table.to_batches(), *settings, train_on_thinking=thinking):
        for row in batch.to_pylist():
            pieces = [[]] if row["labels"][0] == -100 else [[row["labels"][0]]]
            for label in row["labels"][1:]:
                pieces = [*pieces, []] if label == -100 else [*pieces[:-1], [*pieces[-1], label]]
            text, *answers = (str(tokenizer.decode(each)) for each in (row["input_ids"], *pieces) if each)
            found.append((text, answers))
    return found, bad.notes()


EXPECTED = {
    "mistral": [" A1<|end_of_text|>", " A2<|end_of_text|>"],
    "sarvam_m": ["A1<|end_of_text|>", "A2<|end_of_text|>"],
    "airavata": ["A1<|end_of_text|>", "A2<|end_of_text|>"],
    "llama_3_2": ["A1<|eot_id|>", "A2<|eot_id|>"],
    "gemma_3": ["A1<end_of_turn>", "A2<end_of_turn>"],
    "qwen_3": ["<think>\n\n</think>\n\nA1<|im_end|>", "<think>\n\n</think>\n\nA2<|im_end|>"],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_answers_of_published_templates_are_learned_with_their_ends(name: str) -> None:
    found, _ = learned(tokenizer_of(PUBLISHED[name]), TWO_TURNS)
    assert [answer for _, answers in found for answer in answers] == EXPECTED[name]
    assert len(found) == (2 if name == "qwen_3" else 1)


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_answer_follows_the_prompt_that_the_model_reads_later(name: str, turns: list[tuple[str, str]]) -> None:
    """Telugu and Tamil are bytes here, so the borders of characters are within words of tokens."""
    tokenizer = tokenizer_of(PUBLISHED[name])
    template = choose_template(tokenizer, None, False, False)
    messages = chat(*turns, system="उत्तर दीजिए।")
    table = tokenise_chats(rows(messages), tokenizer, template, 1000)
    for number, (_, answer) in enumerate(turns, 1):
        before = prompt_ids(messages[: 1 + 2 * number], tokenizer, template)
        (row,) = [each for each in table if begins(each, before)]
        end = next(i for i, label in enumerate([*row["labels"], -100]) if i >= len(before) and label == -100)
        ids = row["labels"][len(before) : end]
        assert str(tokenizer.decode(ids)).startswith(EXPECTED[name][0].partition("A1")[0] + answer)
        assert ids[-1] in answer_ends(tokenizer, template)


def begins(row: dict[str, list[int]], before: list[int]) -> bool:
    """Whether a row has a prompt, none of whose last message is learned, and learns what follows it."""
    at = len(before)
    return row["input_ids"][:at] == before and row["labels"][at - 1] == -100 and row["labels"][at] != -100


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", TURNS)
def test_a_template_without_its_marks_learns_the_same(turns: list[tuple[str, str]], name: str) -> None:
    """Whole conversations, and cut in the second answer and in the first."""
    tokenizer = byte_level_tokenizer()
    marked = choose_template(tokenizer, name, False, False)
    unmarked = UNLIKE_MARKS.sub("", marked)
    assert unmarked != marked
    tokenizer.chat_template = unmarked
    assert choose_template(tokenizer, None, False, False) == unmarked
    given = rows(chat(*turns, system="S"), chat(*turns))
    (whole, _) = tokenise_chats(given, tokenizer, marked, 1000)["labels"]
    first = next(index for index, label in enumerate(whole) if label != -100)
    for max_length in (1000, len(whole) - 4, first + 3):
        tables = [tokenise_chats(given, tokenizer, each, max_length).to_dict() for each in (marked, unmarked)]
        assert tables[0] == tables[1]


def test_packs_of_a_template_without_its_marks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_level_tokenizer()
    marked = choose_template(tokenizer, "chatml", False, False)
    Path("unmarked.jinja").write_text(UNLIKE_MARKS.sub("", marked), encoding="utf-8")
    lines = [json.dumps({"messages": chat(*turns)}) for turns in TURNS]
    Path("t.jsonl").write_text("\n".join(lines), encoding="utf-8")
    made = []
    for name in ("chatml", "unmarked.jinja"):
        args = ChatDataArguments(train_file="t.jsonl", chat_template=name, packing=True, max_length=300)
        splits = load(args)
        template = set_template(tokenizer, splits.rows, args)
        made.append(tokenise_chat_splits(splits, tokenizer, template, args).datasets["train"].to_dict())
    assert made[0] == made[1]


def test_a_template_that_trl_knows_learns_the_same_without_trl() -> None:
    from trl.chat_template_utils import llama3_chat_template

    tokenizer, given = byte_level_tokenizer(), rows(TWO_TURNS, chat(("Q", "A"), system="S"))
    tokenizer.chat_template = llama3_chat_template
    of_trl = choose_template(tokenizer, None, False, False)
    assert of_trl != llama3_chat_template
    tables = [tokenise_chats(given, tokenizer, each, 999).to_dict() for each in (of_trl, llama3_chat_template)]
    assert tables[0] == tables[1]


def test_trls_version_that_writes_earlier_answers_otherwise_is_not_taken() -> None:
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = tokenizer_of(qwen3_chat_template)
    assert choose_template(tokenizer, None, False, False) == qwen3_chat_template
    found, _ = learned(tokenizer, TWO_TURNS)
    assert [answers for _, answers in found] == [[each] for each in EXPECTED["qwen_3"]]


def test_what_is_not_written_as_it_goes_on_is_learned_in_a_row_of_its_own() -> None:
    found, (note,) = learned(tokenizer_of(QWEN_3), TWO_TURNS, chat(("Q3", "A3")))
    first, second, third = EXPECTED["qwen_3"] + ["<think>\n\n</think>\n\nA3<|im_end|>"]
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
    before = turn.format("Q1", "A1<|im_end|>\n")
    assert found == [
        (turn.format("Q1", first) + "\n", [first]),
        (before + turn.format("Q2", second) + "\n", [second]),
        (turn.format("Q3", third) + "\n", [third]),
    ]
    assert note.startswith("t.jsonl: ")
    assert note.endswith("2 conversations make 3 rows.")


def test_rows_of_a_conversation_that_the_cut_leaves_no_answer_are_counted() -> None:
    found, (note,) = learned(tokenizer_of(QWEN_3), TWO_TURNS, max_length=30)
    assert [answers for _, answers in found] == [EXPECTED["qwen_3"][:1]]
    assert "1 conversations make 1 rows. 1 more answers lie beyond --max_length" in note
    given = rows(TWO_TURNS, TWO_TURNS)
    found_problems = problems_raised(lambda: tokenise_chats(given, tokenizer_of(QWEN_3), QWEN_3, 12))
    assert found_problems == [f"--train_file t.jsonl:{line} answers-cut-off" for line in (1, 2)]


def test_each_conversation_is_one_sample_however_many_rows_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chats = [TWO_TURNS, chat(("Q3", "A3")), chat(("Q4", "A4"), ("Q5", "A5"), ("Q6", "A6"))]
    Path("t.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in chats), encoding="utf-8")
    tokenizer, args = tokenizer_of(QWEN_3), ChatDataArguments(train_file="t.jsonl", validation_file="t.jsonl")
    splits = load(args)
    made = tokenise_chat_splits(splits, tokenizer, set_template(tokenizer, splits.rows, args), args)
    assert [len(each) for each in made.datasets.values()] == [6, 6]
    assert made.notes[0].startswith("--train_file t.jsonl: the chat template writes earlier answers otherwise")
    assert [made.location(index) for index in range(6)] == [f"t.jsonl:{line}" for line in (1, 1, 2, 3, 3, 3)]
    sampled, of_samples = made.samples(9)
    assert sampled == chats
    assert of_samples is not None
    assert of_samples["rows"][:] == [[0], [1], [2]]


THOUGHTS = chat(("Q1", "<think>\nT1\n</think>\n\nA1"), ("Q2", "<think>\nT2\n</think>\n\nA2"))


@pytest.mark.parametrize(
    ("name", "thinks", "answers"),
    [
        ("qwen_3", True, [f"<think>\nT{n}\n</think>\n\nA{n}<|im_end|>" for n in (1, 2)]),
        ("qwen_3", False, [f"\n\nA{n}<|im_end|>" for n in (1, 2)]),
        ("sarvam_m", True, [f"<think>\nT{n}\n</think>\n\nA{n}<|end_of_text|>" for n in (1, 2)]),
        ("sarvam_m", False, [f"\n\nA{n}<|end_of_text|>" for n in (1, 2)]),
        ("mistral", True, [f" <think>\nT{n}\n</think>\n\nA{n}<|end_of_text|>" for n in (1, 2)]),
        ("mistral", False, [f"\n\nA{n}<|end_of_text|>" for n in (1, 2)]),
    ],
)
def test_thoughts_are_learned_as_the_template_writes_them_or_not_at_all(
    name: str, thinks: bool, answers: list[str]
) -> None:
    found, _ = learned(tokenizer_of(PUBLISHED[name]), THOUGHTS, thinking=thinks)
    assert [answer for _, of_row in found for answer in of_row] == answers


def test_thoughts_that_a_prompt_opens_are_not_learned_either() -> None:
    opens = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<think>\n{% else %}{{ eos_token }}{% endif %}"
    )
    tokenizer = tokenizer_of(opens + "{% endfor %}")
    closed = chat(("Q", "T\n</think>\n\nA"))
    assert learned(tokenizer, closed)[0][0][1] == ["T\n</think>\n\nA<|end_of_text|>"]
    assert learned(tokenizer, closed, thinking=False)[0][0][1] == ["\n\nA<|end_of_text|>"]
    given = rows(closed, chat(("Q", "T")))
    bad = BadRows("t.jsonl")
    template = choose_template(tokenizer, None, False, False)
    batches = tokenised_chats(given.table.to_batches(), tokenizer, template, 99, False, bad, train_on_thinking=False)
    assert problems_raised(lambda: list(batches)) == ["t.jsonl:2 answer-unmarked"]


def test_marks_do_not_keep_thoughts_that_are_not_to_be_learned() -> None:
    tokenizer = tokenizer_of("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    found, _ = learned(tokenizer, chat(("Q", "<think>T</think>A")), thinking=False)
    assert found[0][1] == ["A"]


def test_a_template_that_opens_thoughts_does_not_where_that_is_its_way_to_answer_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text(json.dumps({"messages": TWO_TURNS}), encoding="utf-8")
    tokenizer, args = tokenizer_of(SARVAM_M), ChatDataArguments(train_file="t.jsonl")
    template = set_template(tokenizer, load(args).rows, args)
    assert tokenizer.chat_template == template == NOT_THINKING + SARVAM_M
    (note,) = template_notes(tokenizer, template, False)
    assert "enable_thinking false" in note
    user = [{"role": "user", "content": "Q"}]
    settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    as_saved_and_thinking: list[dict[str, Any]] = [{}, {"enable_thinking": True}]
    texts = [str(tokenizer.apply_chat_template(user, **settings, **given)) for given in as_saved_and_thinking]
    assert [text.endswith("<think>\n") for text in texts] == [False, True]
    assert choose_template(tokenizer, None, False, False) == template  # of the saved tokenizer


def test_the_date_of_a_template_is_the_same_on_every_day() -> None:
    found, _ = learned(tokenizer_of(LLAMA_3_2), TWO_TURNS)
    assert "Today Date: 26 Jul 2024\n" in found[0][0]


def test_a_token_with_characters_of_prompt_and_answer_is_learned() -> None:
    tokenizer = words_tokenizer()  # of words between spaces: `o` and `k` become one
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (row,) = tokenise_chats(rows(chat((". o", "k ."))), tokenizer, tokenizer.chat_template, 9)
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == [".", "ok", "."]
    assert row["labels"] == [-100, *row["input_ids"][1:]]


def test_a_token_with_characters_of_prompt_and_thoughts_is_not_learned_where_thoughts_are_not() -> None:
    tokenizer, template = words_tokenizer(), "{% for m in messages %}{{ m.content }}{% endfor %}"
    given, bad = rows(chat((". o", "<think>b ok </think> ok"))), BadRows("t.jsonl")
    (batch,) = tokenised_chats(given.table.to_batches(), tokenizer, template, 9, False, bad, train_on_thinking=False)
    assert batch["labels"].to_pylist() == [[-100, -100, -100, -100, tokenizer.convert_tokens_to_ids("ok")]]


def test_a_template_that_always_opens_thoughts_learns_answers_that_have_some() -> None:
    opens = "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"
    tokenizer = tokenizer_of(f"{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}{opens}")
    assert choose_template(tokenizer, None, False, False) == tokenizer.chat_template
    found, _ = learned(tokenizer, THOUGHTS[:2])
    assert found[0][1] == ["T1\n</think>\n\nA1"]
    refused = problems_raised(lambda: learned(tokenizer, TWO_TURNS))
    assert refused == ["t.jsonl:1 template-rewrites-prompt"]


def test_markers_that_are_no_tokens_are_the_models_own_format() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = AIRAVATA
    template = choose_template(tokenizer, None, False, False)
    (note,) = template_notes(tokenizer, template, False)
    assert "<|assistant|>, <|user|>" in note


def test_an_answer_without_an_end_is_told() -> None:
    tokenizer = tokenizer_of(QWEN_3.replace("<|im_end|>", ""))
    (note,) = template_notes(tokenizer, choose_template(tokenizer, None, False, False), False)
    assert "never learns to stop" in note


def test_a_template_that_rewrites_its_prompt_is_refused_with_the_first_difference() -> None:
    with pytest.raises(UserError) as refused:
        choose_template(tokenizer_of(NOT_A_PREFIX), None, False, False)
    assert summaries(refused.value) == ["--chat_template of  template-rewrites-prompt"]
    details = refused.value.problems[0].details
    assert details == {"number": 2, "at": 7, "shorter": repr("?\n"), "longer": repr(".\nassistant: b?\n")}
    assert choose_template(tokenizer_of(NOT_A_PREFIX), None, False, True) == NOT_A_PREFIX  # all tokens are learned


def test_a_row_whose_prompt_is_rewritten_is_refused_with_the_first_difference() -> None:
    opens = "{{ '<|im_start|>'"
    template = QWEN_3.replace(opens, "{{ '<|im_end|>' if m.content == 'Q' and loop.last else '' }}" + opens, 1)
    given = rows(chat(("Q1", "A")), chat(("Q", "A")))
    with pytest.raises(UserError) as refused:
        tokenise_chats(given, tokenizer_of(template), template, 99)
    assert summaries(refused.value) == ["--train_file t.jsonl:2 template-rewrites-prompt"]
    details = refused.value.problems[0].details
    assert (details["number"], details["at"]) == (2, len("<|im_"))
    assert details["shorter"].startswith("'end|><|im_start|>user")
    assert details["longer"].startswith("'start|>user")


@pytest.mark.parametrize("prompts", [False, True])
def test_rows_of_which_the_template_drops_a_message_are_refused(prompts: bool) -> None:
    one, system = chat(("a", "b")), chat(("a", "b"), system="a")
    given: Conversations = rows(one, system, TWO_TURNS, one)
    marked = re.sub(r"(\{\{ m.content.*?eos_token.*?\}\})", r"{% generation %}\1{% endgeneration %}", DROPS_TURNS)
    assert marked != DROPS_TURNS
    for template in (DROPS_TURNS, marked):
        with pytest.raises(UserError) as refused:
            tokenise_chats(given, tokenizer_of(template), template, 99, prompts)
        assert summaries(refused.value) == [f"--train_file t.jsonl:{line} template-drops-text" for line in (2, 3)]
        found = [(each.details["number"], each.details["role"]) for each in refused.value.problems]
        assert found == [(1, "system"), (1, "user")]


def test_an_answer_whose_text_the_template_drops_is_refused() -> None:
    template = AIRAVATA.replace("m.content|trim", "m.content.split('</think>')[-1]|trim")
    assert choose_template(tokenizer_of(template), None, False, False) == template
    given = rows(chat(("Q", "A")), THOUGHTS)
    found = problems_raised(lambda: tokenise_chats(given, tokenizer_of(template), template, 99))
    assert found == ["--train_file t.jsonl:2 template-drops-text"]


DROPS_THOUGHTS = "m.content.split('</think>')[-1]"
MARKED = (
    "{%- for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|im_start|>' }}"
    "{% else %}{% generation %}{{ ANSWER + '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor -%}"
)


def tokenizer_of_trl(name: str) -> PreTrainedTokenizerFast:
    """It has the template as TRL keeps it, and the tokens that the template writes."""
    from trl import chat_template_utils

    template = getattr(chat_template_utils, f"{name}_chat_template")
    tokenizer = tokenizer_of(template)
    tokenizer.add_tokens(sorted(set(re.findall(r"<[^\s<>{}'\"]+>|\[[a-zA-Z]+\]", template))))
    return tokenizer


@pytest.mark.parametrize(
    ("name", "messages", "code"),
    [
        ("deepseek_r1_distill", TWO_TURNS[:2], "template-rewrites-prompt"),
        ("deepseek_r1_distill", [*TWO_TURNS[:2], *THOUGHTS[2:]], "template-rewrites-prompt"),
        ("glm4moe", THOUGHTS, "template-drops-text"),
        ("lfm2_2_5", THOUGHTS, "template-drops-text"),
        ("nemotron_3_nano", THOUGHTS, "template-rewrites-prompt"),
        ("nemotron_3_nano", [*THOUGHTS[:2], *TWO_TURNS[2:]], "template-drops-text"),
        ("qwen3_8", THOUGHTS[:2], "template-doubles-thoughts"),
    ],
)
def test_marks_of_trl_are_not_used_on_rows_that_they_write_otherwise(
    name: str, messages: list[Message], code: str
) -> None:
    tokenizer = tokenizer_of_trl(name)
    assert problems_raised(lambda: learned(tokenizer, messages)) == [f"t.jsonl:1 {code}"]


def test_a_template_that_trl_knows_is_refused_if_no_answer_follows_its_prompt() -> None:
    tokenizer = tokenizer_of_trl("deepseekv3")  # it opens thoughts in its prompt, and writes none
    found = problems_raised(lambda: choose_template(tokenizer, None, False, False))
    assert found == ["--chat_template of  template-rewrites-prompt"]


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("deepseek_r1_distill", THOUGHTS),
        ("glm4moe", TWO_TURNS),
        ("glm4moe", [*TWO_TURNS[:2], *THOUGHTS[2:]]),
        ("gptoss", THOUGHTS),
        ("lfm2_2_5", TWO_TURNS),
        ("llama3", THOUGHTS),
        ("nemotron_3_nano", TWO_TURNS),
        ("phi3", THOUGHTS),
        ("qwen3_8", TWO_TURNS),
    ],
)
def test_marks_of_trl_enclose_whole_answers_after_their_prompts(name: str, messages: list[Message]) -> None:
    tokenizer = tokenizer_of_trl(name)
    ((text, answers),) = learned(tokenizer, messages)[0]
    template = choose_template(tokenizer, None, False, False)
    for number, answer in enumerate(answers, 1):
        assert text.startswith(str(tokenizer.decode(prompt_ids(messages[: 2 * number], tokenizer, template))))
        thoughts = [f"T{number}"] if "T" in messages[2 * number - 1]["content"] else []
        assert re.findall(r"[TA]\d", answer) == [*thoughts, f"A{number}"]


def test_a_template_with_marks_does_not_drop_thoughts() -> None:
    tokenizer = tokenizer_of(MARKED.replace("ANSWER", DROPS_THOUGHTS))
    assert learned(tokenizer, TWO_TURNS)[0][0][1] == ["A1<|im_end|>", "A2<|im_end|>"]
    for messages in (THOUGHTS[:2], THOUGHTS, chat(("Q", "<think>ok</think>ok"), ("ok? ok.", "A"))):
        assert problems_raised(partial(learned, tokenizer, messages)) == ["t.jsonl:1 template-drops-text"]
    assert len(learned(tokenizer_of(MARKED.replace("ANSWER", "m.content")), THOUGHTS)[0][0][1]) == 2


def test_a_template_with_marks_does_not_rewrite_its_prompt() -> None:
    asks = "{% if add_generation_prompt %}{{ 'OPENED' }}{% endif %}"
    template = MARKED.replace("ANSWER", "m.content") + asks
    with pytest.raises(UserError) as refused:
        choose_template(tokenizer_of(template), None, False, False)
    assert summaries(refused.value) == ["--chat_template of  template-rewrites-prompt"]
    found = refused.value.problems[0].details
    assert found == {"number": 2, "at": 13, "shorter": repr("OPENED"), "longer": repr("b<|im_end|>")}
    assert choose_template(tokenizer_of(template), None, False, True) == template  # all tokens are learned


def test_a_template_with_marks_opens_no_thoughts_where_that_is_its_way_to_answer_without() -> None:
    tokenizer = tokenizer_of_trl("nemotron_3_nano")
    template = choose_template(tokenizer, None, False, False)
    assert template.startswith(NOT_THINKING)
    prompt = str(tokenizer.decode(prompt_ids(TWO_TURNS[:2], tokenizer, template)))
    assert prompt.endswith("<|im_start|>assistant\n<think></think>")


@pytest.mark.parametrize("start", ["", "{% generation %}"])
@pytest.mark.parametrize("opened", ["<think>\\n", "<think>\\n\\n</think>\\n\\n"])
@pytest.mark.parametrize("in_prompt", [False, True])
def test_thoughts_are_not_written_beside_another_block(start: str, opened: str, in_prompt: bool) -> None:
    asks = f"{{% if add_generation_prompt %}}{{{{ '{opened}' }}}}{{% endif %}}" if in_prompt else ""
    answer = f"{{% if m.role == 'assistant' %}}{start}{{{{ '{opened}' + m.content }}}}"
    end = start.replace("generation", "endgeneration")
    turn = f"{answer}{{{{ eos_token }}}}{end}{{% else %}}{{{{ m.content }}}}{{% endif %}}"
    tokenizer = tokenizer_of(f"{{% for m in messages %}}{turn}{{% endfor %}}{asks}")
    assert len(learned(tokenizer, TWO_TURNS)[0]) == 1
    closed = chat(("<think>Q</think>", "<think>T</think>A"))
    assert problems_raised(lambda: learned(tokenizer, closed)) == ["t.jsonl:1 template-doubles-thoughts"]


@pytest.mark.more
def test_a_model_learns_to_stop(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", vocab_size=11)
    tokenizer = words_tokenizer(None)
    end = "{% if m.role == 'assistant' %}{{ eos_token + ' ok ' }}{% endif %}"
    tokenizer.chat_template = template = f"{{% for m in messages %}}{{{{ m.content + ' ' }}}}{end}{{% endfor %}}"
    assert template_notes(tokenizer, choose_template(tokenizer, None, False, False), False) == []
    good, bad, fine, evil, nice, poor, *_ = WORDS
    chats = [chat((f"{good} .", f"{fine} ok")), chat((bad, "."), (evil, f"{evil} {nice}")), chat((nice, poor))]
    table = tokenise_chats(rows(*chats), tokenizer, template, 99)
    torch.manual_seed(0)
    trainer = tiny_trainer(base, tmp_path / "out", table, max_steps=60, learning_rate=0.3)
    trainer.train()
    ends = answer_ends(tokenizer, template)
    for messages in chats:
        prompt = prompt_ids(messages, tokenizer, template)
        answer = greedy(trainer, prompt, 20, ends)
        assert answer == tokenizer(messages[-1]["content"])["input_ids"]
