"""Conversations to token ids, with the answers marked."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, BertTokenizerLegacy, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from indictune.data.bad_rows import BadRows
from indictune.data.chat.chat_tokens import answer_ends, choose_template, prompt_ids, tokenised_chats
from indictune.data.chat.conversations import Conversations
from indictune.data.chat.messages import Message
from indictune.errors import UserError
from indictune.models import builtin
from tests.data.chats import load_test_file, tokenise_chats
from tests.data.published_templates import AIRAVATA, MISTRAL
from tests.models.tiny import words_tokenizer
from tests.problems import problems_raised, summaries
from tests.ranks.launching import ROOT

LLAMA2_FILE = ROOT / "../shared/data/tokenizers/llama2/tokenizer.model"
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]
TEMPLATES = ["llama3", "llama2", "chatml", "tulu", "plain"]

HINDI = [("दिल्ली का मौसम कैसा है?", "आज धूप निकली है।"), ("कल?", "कल बारिश होगी, छाता रखिए।")]
TELUGU = [("తెలంగాణ రాజధాని ఏది?", "హైదరాబాద్, ముత్యాల నగరం."), ("ఆంధ్రది?", "అమరావతి.")]
TAMIL = [("திருக்குறளை எழுதியவர் யார்?", "திருவள்ளுவர் எழுதினார்."), ("எத்தனை குறள்கள்?", "1330 😀")]
TURNS = [HINDI, TELUGU, TAMIL]


def chat(*turns: tuple[str, str], system: str | None = None) -> list[Message]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def rows(*chats: list[Message]) -> Conversations:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = {
        "messages": pa.array(chats, pa.list_(message)),
        "language": pa.array([["hi", "te", "ta"][index % 3] for index in range(len(chats))]),
        "line": pa.array(range(1, 1 + len(chats)), pa.int64()),
        "as_written": pa.array([False] * len(chats)),
    }
    return Conversations(pa.table(columns), "t.jsonl", "--train_file")


def byte_level_tokenizer(trim_offsets: bool = False) -> PreTrainedTokenizerFast:
    """Learns Hindi alone: Telugu, Tamil and emoji become bytes."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.decoder = decoders.ByteLevel()
    learnt = BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*LLAMA3_TOKENS, *CHATML_TOKENS],
        show_progress=False,
    )
    backend.train_from_iterator([text for turn in HINDI for text in turn], learnt)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    )


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer()


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    if not LLAMA2_FILE.exists():
        pytest.skip("needs LLaMA 2's tokenizer.model in ../shared/data")
    folder = tmp_path_factory.mktemp("llama2")
    shutil.copy(LLAMA2_FILE, folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def llama2_of_every_token(llama2: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """It normalises after every special token, as LLaMA 2's `tokenizer.json` does."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(llama2.name_or_path)
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def encode(
    tokenizer: PreTrainedTokenizerBase, name: str, chats: Conversations, max_length: int = 1000, **options: bool
) -> Dataset:
    prompts = options.get("train_on_prompts", False)
    return tokenise_chats(chats, tokenizer, choose_template(tokenizer, name, False, prompts), max_length, prompts)


def counted(tokenizer: PreTrainedTokenizerBase, labels: list[int]) -> str:
    return str(tokenizer.decode([label for label in labels if label != -100], clean_up_tokenization_spaces=False))


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Dataset) -> str:
    return str(tokenizer.decode(tokens[0]["input_ids"], clean_up_tokenization_spaces=False))


def test_rows_become_ids_and_labels_in_their_order() -> None:
    # Ids: </s> 2, अच्छा 3, మంచి 5, ok 9, "." 10. There is no token to begin a text with.
    chats = rows(chat(("ok . ", "अच्छा ok"), ("ok ", ".")), chat(("ok ", "మంచి")))
    tokens = encode(words_tokenizer(), "plain", chats)
    assert tokens.to_dict() == {
        "input_ids": [[9, 10, 3, 9, 2, 9, 10, 2], [9, 5, 2]],
        "labels": [[-100, -100, 3, 9, 2, -100, 10, 2], [-100, 5, 2]],
        "length": [8, 3],
        "full_length": [8, 3],
        "language": ["hi", "te"],
        "rows": [[0], [1]],
    }


def test_every_token_counts_where_prompts_are_trained_but_the_first() -> None:
    tokens = encode(words_tokenizer(), "plain", rows(chat(("ok . ", "अच्छा ok"))), train_on_prompts=True)
    assert tokens["labels"][0] == [-100, 10, 3, 9, 2]


def test_an_answer_at_the_very_start_does_not_count_its_first_token() -> None:
    tokens = encode(words_tokenizer(), "plain", rows([{"role": "assistant", "content": "ok ."}]))
    assert tokens["labels"][0] == [-100, 10, 2]


def test_rows_are_cut_at_their_ends_and_their_whole_lengths_kept() -> None:
    chats = rows(chat(("ok ", "ok . ok .")), chat(("ok ", ".")))
    tokens = encode(words_tokenizer(), "plain", chats, max_length=4)
    assert tokens["input_ids"][:] == [[9, 9, 10, 9], [9, 10, 2]]
    assert tokens["labels"][:] == [[-100, 9, 10, 9], [-100, 10, 2]]
    assert tokens["length"][:] == [4, 3]
    assert tokens["full_length"][:] == [6, 3]


def test_rows_without_an_answer_token_are_refused_with_their_places_and_the_length_they_need() -> None:
    long = chat(("ok . ok . ", "ok ."))
    cut = chat(("ok ", "ok ok ok ok ok ok ok ok ok ok"))
    chats = rows(cut, *[long] * 21, chat(("ok ok ok ok ok ok ", ".")))
    with pytest.raises(UserError) as refused:
        encode(words_tokenizer(), "plain", chats, max_length=4)
    assert summaries(refused.value) == [
        *(f"--train_file t.jsonl:{line} answers-cut-off" for line in range(2, 7)),
        "--train_file t.jsonl more-bad-rows",
    ]
    assert refused.value.problems[0].details == {"max_length": 4, "length": 7, "positions": None}
    assert encode(words_tokenizer(), "plain", chats, max_length=8)["labels"][-1][-2:] == [10, 2]


def test_more_rows_than_a_batch_keep_their_order() -> None:
    chats = rows(*[chat(("ok ", "." if index % 7 else "ok .")) for index in range(2_003)])
    tokens = encode(words_tokenizer(), "plain", chats)
    assert tokens["length"][:] == [3 if index % 7 else 4 for index in range(2_003)]
    assert tokens["rows"][:] == [[index] for index in range(2_003)]
    assert tokens["language"][:] == chats.table["language"].to_pylist()


SFT = ROOT / "../shared/data/sft"
SAMPLES = ROOT / "indictune/data/samples/chats/train.jsonl"


def test_a_batch_is_asked_for_when_the_one_before_is_tokenised() -> None:
    chats, asked = rows(*[chat(("ok ", "."))] * 6), []

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in chats.table.to_batches(max_chunksize=2):
            asked.append(batch)
            yield batch

    tokenizer = words_tokenizer()
    template = choose_template(tokenizer, "plain", False, False)
    tokens = tokenised_chats(batches(), tokenizer, template, 9, False, BadRows("t.jsonl"))
    sizes = [(len(asked), batch.num_rows) for batch in tokens]
    assert sizes == [(1, 2), (2, 2), (3, 2)]


@pytest.mark.parametrize("train_on_prompts", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "path",
    [
        SAMPLES,
        *(
            pytest.param(SFT / name, marks=pytest.mark.more)
            for name in ("xquad_hi.messages.jsonl", "v1_sft_demo.jsonl")
        ),
    ],
    ids=str,
)
def test_rows_have_the_tokens_and_labels_that_each_has_alone(path: Path, train_on_prompts: bool) -> None:
    """Written plainly: a row at a time, a token at a time."""
    if not path.exists():
        pytest.skip(f"no real data at {path}")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(builtin.resolve("builtin:tiny-indic-llama"))
    chats = load_test_file(str(path))
    template = choose_template(tokenizer, "plain", False, train_on_prompts)
    tokens = tokenise_chats(chats, tokenizer, template, 100_000, train_on_prompts)
    assert len(tokens) == len(chats)
    for row, messages in zip(tokens, chats.table["messages"].to_pylist(), strict=True):
        pieces = [(tokenizer.bos_token, train_on_prompts)]
        for message in messages:
            answer = message["role"] == "assistant"
            pieces.append((message["content"] + tokenizer.eos_token * answer, answer or train_on_prompts))
        text = "".join(piece for piece, _ in pieces)
        counts = [count for piece, count in pieces for _ in piece]
        (encoding,) = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
        counted_tokens = [any(counts[start:stop]) for start, stop in encoding.offsets]
        counted_tokens[0] = False
        assert row["input_ids"] == encoding.ids
        assert row["labels"] == [
            token if count else -100 for token, count in zip(encoding.ids, counted_tokens, strict=True)
        ]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", TURNS)
def test_byte_level_labels_are_the_answers_with_their_ends(
    turns: list[tuple[str, str]], name: str, trim_offsets: bool
) -> None:
    tokenizer = byte_level_tokenizer(trim_offsets)
    end = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}.get(name, "<|end_of_text|>")
    before, after = (" ", " ") if name == "llama2" else ("", "")
    (labels,) = encode(tokenizer, name, rows(chat(*turns, system="उत्तर दीजिए।")))["labels"][:]
    assert counted(tokenizer, labels) == "".join(f"{before}{answer}{after}{end}" for _, answer in turns)


@pytest.mark.parametrize("tokenizer", ["llama2", "llama2_of_every_token"])
@pytest.mark.parametrize("name", ["llama2", "plain"])
@pytest.mark.parametrize("turns", TURNS)
def test_llama2_labels_are_the_answers_with_their_ends(
    request: pytest.FixtureRequest, turns: list[tuple[str, str]], name: str, tokenizer: str
) -> None:
    llama2 = request.getfixturevalue(tokenizer)
    (labels,) = encode(llama2, name, rows(chat(*turns)))["labels"][:]
    expected = [f" {answer} </s>" if name == "llama2" else f"{answer}</s>" for _, answer in turns]
    assert counted(llama2, labels) == "".join(expected)


@pytest.mark.parametrize("tokenizer", ["llama2", "llama2_of_every_token"])
@pytest.mark.parametrize("name", ["llama2", "plain"])
def test_llama2_labels_are_the_same_without_marks(request: pytest.FixtureRequest, name: str, tokenizer: str) -> None:
    llama2, given = request.getfixturevalue(tokenizer), rows(*(chat(*turns) for turns in TURNS))
    marked = choose_template(llama2, name, False, False)
    unmarked = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", marked)
    tables = [tokenise_chats(given, llama2, each, 1000).to_dict() for each in (marked, unmarked)]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("template", [AIRAVATA, MISTRAL])
def test_llama2_answers_follow_the_prompts_of_templates_without_marks(
    llama2: PreTrainedTokenizerBase, template: str
) -> None:
    for row, turns in zip(
        tokenise_chats(rows(*(chat(*turns) for turns in TURNS)), llama2, template, 1000), TURNS, strict=True
    ):
        prompt = prompt_ids(chat(*turns), llama2, template)
        assert row["input_ids"][: len(prompt)] == prompt
        answer = row["labels"][len(prompt) :]
        assert row["labels"][len(prompt) - 1] == -100
        assert (counted(llama2, answer).strip(), answer[-1]) == (f"{turns[-1][1]}</s>", 2)


def test_llama2_labels_token_by_token(llama2: PreTrainedTokenizerBase) -> None:
    """Neither అ nor 😀 is in the vocabulary: three bytes and four."""
    (row,) = encode(llama2, "llama2", rows(chat(("a", "అ😀"))))
    assert llama2.convert_ids_to_tokens(row["input_ids"]) == [
        *("<s>", "[", "INST", "]", "▁a", "▁[", "/", "INST", "]"),
        *("▁", "<0xE0>", "<0xB0>", "<0x85>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁", "</s>"),
    ]
    assert row["input_ids"][9:] == [29871, 227, 179, 136, 243, 162, 155, 131, 29871, 2]
    assert row["labels"] == [-100] * 9 + [29871, 227, 179, 136, 243, 162, 155, 131, 29871, 2]


def test_transformers_own_mask_still_loses_the_last_bytes_of_an_answer(byte_level: PreTrainedTokenizerFast) -> None:
    """When this fails, transformers marks answers right, and `_overlap` may give way to it."""
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    messages = [{"role": "assistant", "content": "అఆ"}]
    theirs: Any = byte_level.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert theirs["assistant_masks"] == [1, 1, 1, 1, 0, 0]
    (labels,) = tokenise_chats(rows(messages), byte_level, template, 10, False)["labels"][:]
    assert [label != -100 for label in labels] == [False, True, True, True, True, True]


WRITTEN = {
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nR<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>",
    "llama2": "<|begin_of_text|>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A <|end_of_text|>"
    "<|begin_of_text|>[INST] R [/INST] B <|end_of_text|>",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n",
    "tulu": "<|begin_of_text|><|system|>\nS\n<|user|>\nQ\n<|assistant|>\nA<|end_of_text|>\n"
    "<|user|>\nR\n<|assistant|>\nB<|end_of_text|>\n",
    "plain": "<|begin_of_text|>SQA<|end_of_text|>RB<|end_of_text|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_write_their_format(byte_level: PreTrainedTokenizerFast, name: str) -> None:
    tokens = encode(byte_level, name, rows(chat(("Q", "A"), ("R", "B"), system="S")))
    assert text_of(byte_level, tokens) == WRITTEN[name]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("turns", TURNS)
def test_the_prompt_of_a_row_is_its_beginning(
    byte_level: PreTrainedTokenizerFast, turns: list[tuple[str, str]], name: str
) -> None:
    messages = chat(*turns, system="S")
    (row,) = encode(byte_level, name, rows(messages))
    prompt = prompt_ids(messages, byte_level, choose_template(byte_level, name, False, False))
    assert row["input_ids"][: len(prompt)] == prompt
    last = len(prompt) - 1
    assert row["labels"][last] == -100
    assert -100 not in row["labels"][last + 1 : last + 4]


def test_llama2_prompt_of_a_row_is_its_beginning(llama2: PreTrainedTokenizerBase) -> None:
    messages = chat(*TELUGU)
    (row,) = encode(llama2, "llama2", rows(messages))
    prompt = prompt_ids(messages, llama2, choose_template(llama2, "llama2", False, False))
    assert row["input_ids"][: len(prompt)] == prompt
    assert str(llama2.decode(prompt)).endswith("[INST] ఆంధ్రది? [/INST]")


def test_a_tokenizer_that_adds_tokens_of_its_own_adds_none_to_a_template() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", LLAMA3_TOKENS.index("<|begin_of_text|>"))]
    )
    assert tokenizer("Q")["input_ids"][0] == tokenizer.bos_token_id
    messages = chat(("Q", "A"))
    (ids,) = encode(tokenizer, "plain", rows(messages))["input_ids"][:]
    assert ids.count(tokenizer.bos_token_id) == 1
    prompt = prompt_ids(messages, tokenizer, choose_template(tokenizer, "plain", False, False))
    assert prompt.count(tokenizer.bos_token_id) == 1


def test_texts_given_as_written_stay_so_without_a_name(byte_level: PreTrainedTokenizerFast) -> None:
    template = choose_template(byte_level, None, True, False)
    tokens = tokenise_chats(rows(chat((" Q: ", " A\n"))), byte_level, template, 99, False)
    assert text_of(byte_level, tokens) == "<|begin_of_text|> Q:  A\n<|end_of_text|>"
    assert choose_template(byte_level, "llama3", True, False) == choose_template(byte_level, "llama3", False, False)


WRITTEN_OUT = chat(
    (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|><|start_header_id|>assistant"
        "<|end_header_id|>\n\n",
        "A<|eot_id|>",
    )
)


def test_texts_that_hold_their_marks_get_none_of_them_twice_from_plain() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.eos_token = "<|eot_id|>"  # as LLaMA 3 Instruct has it
    template = choose_template(tokenizer, None, True, False)
    tokens = tokenise_chats(rows(WRITTEN_OUT), tokenizer, template, 99, False)
    assert text_of(tokenizer, tokens) == "".join(message["content"] for message in WRITTEN_OUT)
    assert counted(tokenizer, tokens[0]["labels"]) == "A<|eot_id|>"
    prompt = prompt_ids(WRITTEN_OUT, tokenizer, template)
    assert tokens[0]["input_ids"][: len(prompt)] == prompt


MARKED = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% endfor %}"
UNMARKED = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(("name", "token"), [("llama3", "<|eot_id|>"), ("chatml", "<|im_end|>"), ("plain", None)])
def test_an_answer_ends_as_the_template_ends_it_whether_that_marks_it_or_not(
    byte_level: PreTrainedTokenizerFast, name: str, token: str | None
) -> None:
    template = choose_template(byte_level, name, False, False)
    unmarked = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    assert unmarked != template
    expected = sorted(byte_level.get_vocab()[each] for each in (token, "<|end_of_text|>") if each)
    assert answer_ends(byte_level, template) == answer_ends(byte_level, unmarked) == expected


def test_of_what_an_unmarked_template_writes_after_an_answer_the_first_added_token_ends_it(
    byte_level: PreTrainedTokenizerFast,
) -> None:
    ends, end_of_text = (byte_level.get_vocab()[each] for each in ("<|im_end|>", "<|end_of_text|>"))
    template = "{% for m in messages %}<|im_start|>{{ m.content }}.\n<|im_end|>{% endfor %}<|im_start|>"
    assert answer_ends(byte_level, template) == sorted([ends, end_of_text])
    assert answer_ends(byte_level, UNMARKED + "!") == [end_of_text]


def test_a_template_that_writes_the_date_writes_the_same_on_every_day(byte_level: PreTrainedTokenizerFast) -> None:
    """Else a run that is stopped could not go on after midnight: its rows would be others."""
    template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        "{% for message in messages %}{% if message.role == 'user' %}"
        "{{ message.content }}{% else %}{% generation %}{{ message.content }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    written = byte_level.decode(prompt_ids(chat(HINDI[0]), byte_level, template))
    assert written == f"26 Jul 2024{HINDI[0][0]}"


def test_rows_that_the_template_refuses_are_reported_by_reason(byte_level: PreTrainedTokenizerFast) -> None:
    tool = [*chat(("Q", "A")), {"role": "tool", "content": "T"}]
    late = [*chat(("Q", "A")), {"role": "system", "content": "S"}]
    found = problems_raised(lambda: encode(byte_level, "llama2", rows(tool, chat(("Q", "A")), late, tool)))
    assert found == [f"--train_file t.jsonl:{line} template-refuses-row" for line in (1, 3, 4)]


def test_refused_rows_of_all_batches_are_reported(byte_level: PreTrainedTokenizerFast) -> None:
    tool = [*chat(("Q", "A")), {"role": "tool", "content": "T"}]
    good = [chat(("Q", "A"))] * 800
    found = problems_raised(lambda: encode(byte_level, "llama2", rows(*good, tool, *good, tool)))
    assert found == [f"--train_file t.jsonl:{line} template-refuses-row" for line in (801, 1602)]


def test_rows_whose_answers_the_template_does_not_mark_are_reported(byte_level: PreTrainedTokenizerFast) -> None:
    template = MARKED.replace(
        "{%- generation", "{% if m.content in 'AQ' %}{{ m.content }}{% else %}{%- generation"
    ).replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
    given = rows(chat(("Q", "B C")), chat(("Q", "A")))
    found = problems_raised(lambda: tokenise_chats(given, byte_level, template, 99, False))
    assert found == ["--train_file t.jsonl:2 answer-unmarked"]


def test_a_tokenizer_without_offsets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nok\n", encoding="utf-8")
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))  # type: ignore[no-untyped-call]
    found = problems_raised(lambda: tokenise_chats(rows(chat(("ok", "ok"))), slow, MARKED, 99, False))
    assert found[0].endswith("slow-tokenizer")
