"""Pairs of texts: read and checked as pairs, and written by each model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from indictune.config.arguments import DataArguments
from indictune.data.cache import StoredRows
from indictune.data.collation import IndexedRows, JoinRows, PadToLongest
from indictune.data.columns import BETWEEN_TEXTS
from indictune.data.health.row_health import language_health
from indictune.data.load_rows import load_splits
from indictune.data.row_choice import Splits, ValidationSplit
from indictune.data.text.cleaning import clean
from indictune.data.text.pairs import read_pairs
from indictune.data.text.tokenisation import tokenise_splits, usual_length
from indictune.models.serving_model import serve_as_trained
from indictune.models.unpadded import classify_unpadded, uncounted_token
from tests.models.test_serving_tokenizer import albert, bert, xlm_roberta
from tests.models.tiny import CONFIGS, words_tokenizer
from tests.problems import problems_raised
from tests.refusals import refused

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONG = " ".join(LETTERS)


def modernbert() -> Any:
    """A tokenizer without token types."""
    own = bert()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=own.backend_tokenizer, model_input_names=inputs, **names)  # type: ignore[no-untyped-call]


def llama() -> Any:
    pieces = ["<unk>", "<s>", "</s>", "▁", *LETTERS]
    return LlamaTokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], add_bos_token=True)


def qwen() -> Any:
    pieces = [*LETTERS, "Ġ", "<|endoftext|>"]
    return Qwen2Tokenizer(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[])


# Architecture -> its tokenizer, the tokens of ("ab", "c"), and the token types that the model reads.
MODELS: dict[str, tuple[Callable[[], Any], str, list[int] | None]] = {
    "bert": (bert, "[CLS] a ##b [SEP] c [SEP]", [0, 0, 0, 0, 1, 1]),
    "albert": (albert, "[CLS] ▁ a b [SEP] ▁ c [SEP]", [0, 0, 0, 0, 0, 1, 1, 1]),
    "xlm-roberta": (xlm_roberta, "<s> ▁ a b </s> </s> ▁ c </s>", None),
    "modernbert": (modernbert, "[CLS] a ##b [SEP] c [SEP]", None),
    "llama": (llama, "<s> ▁ a b <s> ▁ c", None),
}


def stored(folder: Path, pairs: list[tuple[str, str]]) -> Splits[StoredRows]:
    lines = [json.dumps({"a": first, "b": second, "label": "yn"[at % 2]}) for at, (first, second) in enumerate(pairs)]
    (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    file = str(folder / "rows.jsonl")
    return load_splits(DataArguments(train_file=file, text_column="a", text_pair_column="b"))


def tokens_of(folder: Path, pairs: list[tuple[str, str]], tokenizer: Any, max_length: int) -> Dataset:
    return tokenise_splits(stored(folder, pairs), tokenizer, ["n", "y"], max_length)["train"]


@pytest.mark.parametrize("name", MODELS)
def test_pairs_are_written_by_the_tokenizer_s_own_call(name: str, tmp_path: Path) -> None:
    make, expected, types = MODELS[name]
    tokenizer, own, config = make(), make(), CONFIGS[name]()
    read_pairs(tokenizer, config)
    pairs = [("ab", "c"), (LONG, "a b c"), ("a b c", LONG), (LONG, LONG)]
    rows = tokens_of(tmp_path, pairs, tokenizer, 24)
    called = own(*map(list, zip(*pairs, strict=True)), truncation="longest_first", max_length=24)
    assert rows["input_ids"][:] == called["input_ids"]
    assert own.convert_ids_to_tokens(rows["input_ids"][0]) == expected.split()
    assert ("token_type_ids" in rows.column_names) is (types is not None)
    if types is not None:
        both = [list(each) for each in zip(*pairs, strict=True)]
        own_types = own(*both, truncation="longest_first", max_length=24, return_token_type_ids=True)
        assert rows["token_type_ids"][:] == own_types["token_type_ids"]
        assert rows["token_type_ids"][0] == types
    assert rows["length"][1:] == [24, 24, 24]
    # The longer text is cut first: the other one is whole.
    short = own("a b c", add_special_tokens=False)["input_ids"]
    for ids in rows["input_ids"][1:3]:
        assert short in [ids[start : start + len(short)] for start in range(len(ids))]


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_a_model_gets_the_token_types_padded_or_joined(name: str, tmp_path: Path) -> None:
    tokenizer, config = MODELS[name][0](), CONFIGS[name]()
    read_pairs(tokenizer, config)
    pairs = [("ab", "c"), ("a b c d", "e"), ("x", LONG)]
    rows = IndexedRows(tokens_of(tmp_path, pairs, tokenizer, 20))
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config).eval()  # type: ignore[no-untyped-call]
    torch.nn.init.normal_(model.base_model.embeddings.token_type_embeddings.weight)
    batches = [collate([rows[at] for at in range(3)]) for collate in (PadToLongest(0, "right"), JoinRows(None, False))]
    with torch.no_grad():
        alone = [dict(tokenizer(*pair, truncation=True, max_length=20, return_tensors="pt")) for pair in pairs]
        expected = torch.cat([model(**each).logits for each in alone])
        without = [model(**(each | {"token_type_ids": torch.zeros_like(each["input_ids"])})).logits for each in alone]
        assert (torch.cat(without) - expected).abs().min() > 1e-4
        for batch in batches:
            if "position_ids" in batch:
                classify_unpadded(model)
            del batch["labels"]
            torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=1e-5)
    assert uncounted_token(config) is None


def test_cached_tokens_are_those_that_the_model_reads(tmp_path: Path) -> None:
    for name, has_types in (("bert", True), ("modernbert", False), ("albert", True)):
        tokenizer = bert()
        read_pairs(tokenizer, CONFIGS[name]())
        rows = tokens_of(tmp_path, [("ab", "c"), ("c", "ab")], tokenizer, 20)
        assert ("token_type_ids" in rows.column_names) is has_types


def test_a_row_that_counts_for_nothing_has_types_too(tmp_path: Path) -> None:
    tokenizer = bert()
    read_pairs(tokenizer, CONFIGS["bert"]())
    rows = IndexedRows(tokens_of(tmp_path, [("ab", "c"), ("c", "ab")], tokenizer, 20))
    batch = JoinRows(labels_of_tokens=False)([rows[-1], rows[0]])
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 1, 1]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 8]


def test_a_tokenizer_without_marks_between_texts_gets_its_end_token(tmp_path: Path) -> None:
    """Also in its files: other programs read them."""
    tokenizer = qwen()
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab", "c")["input_ids"]) == ["a", "b", "c"]
    for _ in range(2):
        read_pairs(tokenizer, CONFIGS["llama"]())
        tokenizer.save_pretrained(tmp_path)
        assert tokenizer.convert_ids_to_tokens(tokenizer("ab")["input_ids"]) == ["a", "b"]
        tokens = ["a", "b", "<|endoftext|>", "c"]
        assert tokenizer.convert_ids_to_tokens(tokenizer("ab", "c")["input_ids"]) == tokens
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        read_pairs(tokenizer, CONFIGS["llama"]())
        assert tokenizer.convert_ids_to_tokens(tokenizer("ab", "c")["input_ids"]) == tokens
    bare = words_tokenizer()
    bare.eos_token = None
    with refused("pair-without-separator"):
        read_pairs(bare, CONFIGS["llama"]())


@pytest.mark.parametrize("make", [bert, albert, xlm_roberta, llama, qwen])
def test_a_saved_tokenizer_cleans_and_marks_raw_pairs(make: Callable[[], Any], tmp_path: Path) -> None:
    tokenizer, config = make(), CONFIGS[{bert: "bert", albert: "albert"}.get(make, "llama")]()
    config.max_position_embeddings = 512
    read_pairs(tokenizer, config)
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    serve_as_trained(tmp_path, tokenizer, config, 20, pairs=True)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    raw = ("x #ab_c @you", f"x http://a.b {LONG}"), (LONG, "ab"), ("a", "b")
    cleaned = [[clean(text) for text in each] for each in zip(*raw, strict=True)]
    found = saved(*map(list, zip(*raw, strict=True)), truncation=True)
    assert dict(found) == dict(tokenizer(*cleaned, truncation=True, max_length=20))
    assert ("token_type_ids" in found) is (make in (bert, albert))
    if make in (bert, albert, xlm_roberta):  # the limit of characters
        assert 200 < len(saved("a " * 3_000, "b " * 3_000)["input_ids"]) <= 512


def test_a_single_first_token_stays_when_the_end_token_is_put_between() -> None:
    tokenizer = qwen()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="z $A", pair="z $A $B:1", special_tokens=[("z", 25)]
    )
    read_pairs(tokenizer, CONFIGS["llama"]())
    assert tokenizer.convert_ids_to_tokens(tokenizer("b", "c")["input_ids"]) == ["z", "b", "<|endoftext|>", "c"]


def test_a_limit_without_room_for_both_texts_is_refused(tmp_path: Path) -> None:
    tokenizer = bert()
    read_pairs(tokenizer, CONFIGS["bert"]())
    with refused("no-room-for-text", "4", flag="--max_length"):
        tokens_of(tmp_path, [("ab", "c"), ("c", "d")], tokenizer, 4)


def test_lengths_are_those_of_pairs(tmp_path: Path) -> None:
    tokenizer = bert()
    read_pairs(tokenizer, CONFIGS["bert"]())
    pairs = [("a b c", "d e")] * 50 + [("a", "b")]
    train = stored(tmp_path, pairs).rows["train"]
    assert usual_length(train.table["text"], tokenizer, None) == 5 + 3
    texts = list(train.texts)
    assert language_health("en", 51, texts, tokenizer, 8)[0].truncated_share == 0
    measured = language_health("en", 51, texts, tokenizer, 7)[0]
    assert measured.truncated_share == pytest.approx(50 / 51)
    assert measured.tokens_per_word == 1


Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.chdir(tmp_path)

    def write_file(name: str, *rows: tuple[Any, ...], columns: str = "Sentence1,Sentence2,Label") -> str:
        lines = [json.dumps(dict(zip(columns.split(","), row, strict=True))) for row in rows]
        Path(name).write_text("\n".join(lines), encoding="utf-8")
        return name

    return write_file


NAMES = {"text_column": "Sentence1", "text_pair_column": "Sentence2", "label_column": "Label"}


def load(**files: Any) -> Splits[StoredRows]:
    return load_splits(DataArguments(**{**NAMES, **files}))


def pairs_in(splits: Splits[StoredRows], split: str = "train") -> list[tuple[str, ...]]:
    return [tuple(text.split(BETWEEN_TEXTS)) for text in splits.rows[split].texts]


def test_both_texts_are_cleaned_and_a_pair_without_one_is_dropped(write: Write) -> None:
    rows = [("#a\x00 b", "@ravi &amp; c", "P"), ("यह", "वह", "NP"), ("d", " ", "P"), (None, "e", "P")]
    splits = load(train_file=write("t.jsonl", *rows))
    assert pairs_in(splits) == [("a b", "@user & c"), ("यह", "वह")]
    assert splits.rows["train"].table["language"].to_pylist()[1] == "hi"
    assert any("2 rows without text were dropped: t.jsonl:3, t.jsonl:4" in note for note in splits.notes)


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_pairs_have_numbers_or_several_labels_too(write: Write, problem_type: str) -> None:
    labels = ["0.0", "4.3", "5"] if problem_type == "regression" else ["x|y", "x", "y"]
    rows = [(text, f"{text} {text}", label) for text, label in zip("abc", labels, strict=True)]
    splits = load(train_file=write("t.jsonl", *rows), problem_type=problem_type)
    assert pairs_in(splits) == [("a", "a a"), ("b", "b b"), ("c", "c c")]


def test_rows_repeat_leak_and_contradict_as_pairs(write: Write) -> None:
    rows = [("a", "b", "P"), ("a", "c", "NP"), ("a b", "c", "P"), ("a", "b c", "P"), ("a", "c", "P"), ("a", "b", "P")]
    files = {"train_file": write("t.jsonl", *rows), "validation_file": write("v.jsonl", ("a", "b c", "NP"))}
    found = {(each.name, each.count) for each in load(**files).findings}
    assert found == {("duplicate_rows", 2), ("leaked_rows", 1), ("conflicting_labels", 2)}
    left = load(**files, drop_leaked_rows=True)
    assert pairs_in(left) == [("a", "b"), ("a", "c"), ("a b", "c"), ("a", "c"), ("a", "b")]


def test_equal_pairs_stay_on_one_side_of_a_split(write: Write) -> None:
    rows = [(str(at % 40), str(at % 40 * 7), "PN"[at % 2]) for at in range(200)]
    args = DataArguments(**NAMES, train_file=write("t.jsonl", *rows))  # type: ignore[arg-type]
    splits = load_splits(args, validation_split=ValidationSplit(0.2, 0))
    train, held_out = set(pairs_in(splits)), set(pairs_in(splits, "validation"))
    assert held_out
    assert not train & held_out


def test_rows_are_kept_for_their_pair_of_columns(write: Write) -> None:
    rows = [("a", "b", "c", "P"), ("d", "e", "f", "N")]
    file = write("t.jsonl", *rows, columns="Sentence1,Sentence2,Other,Label")
    one, other, single = load(train_file=file), load(train_file=file, text_pair_column="Other"), None
    single = load(train_file=file, text_pair_column=None)
    assert len({each.folder for each in (one, other, single)}) == 3
    assert (pairs_in(one)[0], pairs_in(other)[0], pairs_in(single)[0]) == (("a", "b"), ("a", "c"), ("a",))


def test_each_file_without_the_second_column_is_named(write: Write) -> None:
    lacking = {"columns": "Sentence1,Label"}
    files = {
        "train_file": [write("a.jsonl", ("a", "b", "P"), ("b", "c", "N")), write("b.jsonl", ("a", "P"), **lacking)],
        "validation_file": write("c.jsonl", ("a", "P"), **lacking),
    }
    with refused("column-missing", "b.jsonl: ", "c.jsonl: ", "Sentence2", "--text_pair_column"):
        load(**files)
    found = [f"--train_file b.jsonl {code}" for code in ("column-missing", "files-differ")]
    assert problems_raised(lambda: load(**files)) == [*found, "--validation_file c.jsonl column-missing"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ({"text_pair_column": "text"}, "pair-of-one-column"),
        ({"text_pair_column": "b", "long_text": "window"}, "long-text-of-pairs"),
        ({"text_pair_column": "b", "long_text": "head_tail"}, "long-text-of-pairs"),
    ],
)
def test_pairs_that_cannot_be_read_are_refused_at_once(flags: dict[str, Any], code: str) -> None:
    with refused(code):
        DataArguments(train_file="t.csv", **flags)


def test_rejected_rows_keep_both_texts(write: Write, tmp_path: Path) -> None:
    rows = [("a", "b", "P"), ("c", "d", "N")] * 100
    splits = load(train_file=write("t.jsonl", *rows, ("e", "f", None)), bad_rows="quarantine")
    (entry,) = map(json.loads, (splits.folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines())
    assert (entry["read"]["text"], entry["read"]["text_pair"]) == ("e", "f")


def test_damaged_second_texts_are_found(write: Write) -> None:
    damaged = "हाँ यह सच है".encode().decode("latin-1")
    rows = [("a", "b", "P"), ("c", damaged, "N")]
    (found,) = [each for each in load(train_file=write("t.jsonl", *rows)).findings if each.name == "mojibake"]
    assert "t.jsonl:2" in found.note
