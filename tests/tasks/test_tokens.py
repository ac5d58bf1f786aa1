"""Tagged sentences are read strictly, and tags stand at the first token of each word."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, BertConfig

from indictune.config.plan import unresolved
from indictune.config.recipe import read_recipe
from indictune.config.shared_arguments import EvaluationArguments
from indictune.data.sentences import Sentences, tokenised_sentences, with_one_scheme
from indictune.errors import Problems, UserError
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import plan_of_rows
from indictune.tasks.tokens import TaggedRows, TokenClassification
from tests.hub_layouts import decoders, encoders
from tests.hub_layouts.shelf import write_files
from tests.plans import codes
from tests.refusals import refused as refusal

CONLL = "-DOCSTART- -X- O\n\nSita NNP B-PER\nलिखती VB O\n\n\nRavi NNP B-PER\n"
TASK = TokenClassification()


def rows_of(*argv: str) -> TaggedRows:
    plan, problems = plan_of_rows(read_recipe(["--output_dir", "out", *argv], TASK.arguments), TASK)
    return read_rows(plan, TASK, problems)


def refused(*argv: str) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as raised:
        rows_of(*argv)
    return codes(raised.value.problems)


def test_conll_and_json_lines_hold_the_same_sentences(tmp_path: Path) -> None:
    conll, lines = tmp_path / "t.conll", tmp_path / "t.jsonl"
    conll.write_text(CONLL, encoding="utf-8")
    rows = [{"tokens": ["Sita", "लिखती"], "ner": ["B-PER", "O"]}, {"tokens": ["Ravi"], "ner": ["B-PER"]}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = rows_of("--train_file", str(conll))
    table = found.splits["train"].table.select(["words", "tags"])
    assert table.to_pylist() == [
        {"words": ["Sita", "लिखती"], "tags": ["B-PER", "O"]},
        {"words": ["Ravi"], "tags": ["B-PER"]},
    ]
    assert [found.splits["train"].location(row) for row in (0, 1)] == [f"{conll}:3", f"{conll}:7"]
    assert found.tags == ["B-PER", "O"]
    same = rows_of("--train_file", str(lines), "--text_column", "tokens", "--label_column", "ner")
    assert same.splits["train"].table.select(["words", "tags"]) == table


def test_what_nobody_sees_makes_no_other_tag(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("Sita B-PER\nRavi B-PER\u200b\nआई \ufeffO\nगई O\n", encoding="utf-8")
    assert rows_of("--train_file", str(path)).tags == ["B-PER", "O"]


def test_comments_of_conll_are_no_words(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("# id 5239 domain=train\nSita _ _ B-PER\n# _ _ O\n", encoding="utf-8")
    found = rows_of("--train_file", str(path))
    assert found.splits["train"].table["words"].to_pylist() == [["Sita", "#"]]
    assert found.tags == ["B-PER", "O"]


GOOD = '{"text": ["Sita"], "label": ["B-PER"]}\n\n'


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        ("a O\n\nSita B-PER\nRavi\n", "conll-columns-differ", 4),
        ("Sita\nhai\n", "tags-do-not-match", 1),
        ("a O\n\n5 4\n", "tags-are-numbers", 3),
        (GOOD + '{"text": ["Sita"], "label": []}', "tags-do-not-match", 3),
        (GOOD + '{"text": ["Sita"]}', "column-missing", 3),
        (GOOD + '{"text": ["Sita", null], "label": ["B-PER", "O"]}', "tags-do-not-match", 3),
        (GOOD + '{"text": "Sita", "label": ["B-PER"]}', "tags-do-not-match", 3),
        (GOOD + '{"text": ["Sita"], "label": [1]}', "tags-are-numbers", 3),
        (GOOD + "[]", "not-an-object", 3),
        (GOOD + "{", "invalid-json", 3),
    ],
)
def test_a_sentence_that_cannot_be_used_is_refused_with_its_line(
    tmp_path: Path, content: str, code: str, line: int
) -> None:
    path = tmp_path / ("t.jsonl" if content.startswith("{") else "t.conll")
    path.write_text(content, encoding="utf-8")
    with refusal(code, f"{path}:{line}", flag="--train_file"):
        rows_of("--train_file", str(path))


@pytest.mark.parametrize("name", ["t.conll", "t.jsonl"])
def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert refused("--train_file", str(path)) == [("no-such-file", "--train_file")]
    path.write_text("\n", encoding="utf-8")
    assert refused("--train_file", str(path)) == [("no-rows", "--train_file")]


def test_parquet_holds_names_of_tags_and_no_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": [["Sita", "hai"]], "label": [["B-PER", "O"]]}), path)
    assert rows_of("--train_file", str(path)).tags == ["B-PER", "O"]
    pq.write_table(pa.table({"text": [["Sita"]], "label": [[1]]}), path)
    assert refused("--train_file", str(path)) == [("tags-are-numbers", "--train_file")]


@pytest.mark.parametrize(("words", "tags"), [("tokens", "ner_tags"), ("words", "ner")])
def test_class_ids_of_a_dataset_become_the_names_that_it_declares(tmp_path: Path, words: str, tags: str) -> None:
    classes = datasets.List(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    features = datasets.Features({words: datasets.List(datasets.Value("string")), tags: classes})
    (tmp_path / "set/data").mkdir(parents=True)
    for split, row in (("train", [1, 2, 0]), ("validation", [0, 0, 1])):
        count = 1 if split == "validation" else 30
        texts = [["Sita", "Rao", "आई", *(["."] * number)] for number in range(count)]
        rows = datasets.Dataset.from_dict({words: texts, tags: [row + [0] * n for n in range(count)]}, features)
        rows.to_parquet(tmp_path / f"set/data/{split}-00000-of-00001.parquet")
    found = rows_of("--dataset_name", str(tmp_path / "set"))
    assert len(found.splits["train"]) == 30, "its own validation rows are not replaced"
    assert found.splits["train"].table["words"][0].as_py() == ["Sita", "Rao", "आई"]
    assert found.splits["train"].table["tags"][0].as_py() == ["B-PER", "I-PER", "O"]
    assert found.splits["validation"].table["tags"].to_pylist() == [["O", "O", "B-PER"]]


def test_a_model_of_other_schemes_keeps_its_tags_and_one_of_iob2_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a S-PER\nb O\nc B-LOC\nd E-LOC\n", encoding="utf-8")
    plan, _ = plan_of_rows(read_recipe(["--train_file", str(path)], TASK.arguments), TASK)
    asked: Any = unresolved(EvaluationArguments, {"test_file": str(path), "max_length": 9})
    evaluation: Any = replace(plan, data=asked)
    for known, expected in (
        (["O", "S-PER", "B-LOC", "E-LOC"], ["S-PER", "O", "B-LOC", "E-LOC"]),
        (["O", "B-PER", "B-LOC", "I-LOC"], ["B-PER", "O", "B-LOC", "I-LOC"]),
    ):
        config = BertConfig(id2label=dict(enumerate(known)))
        tokenizer = rows_of("--train_file", str(path)).tokenizer
        test = TASK.tokenise_test(replace(evaluation, model_config=config), tokenizer, Problems())
        assert [known[tag] for tag in test.rows["tags"][0]] == expected
        assert bool(test.notes) == ("I-LOC" in known)


def test_a_kind_that_the_model_knows_makes_a_glued_prefix_sure(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a BPER\nb O\n", encoding="utf-8")
    train = rows_of("--train_file", str(path)).splits
    kept, _ = with_one_scheme(train, {"O", "BPER"})
    made, scheme = with_one_scheme(train, {"O", "B-PER", "I-PER"})
    assert [splits["train"].table["tags"].to_pylist() for splits in (kept, made)] == [
        [["BPER", "O"]],
        [["B-PER", "O"]],
    ]
    assert scheme.count == 1


@pytest.mark.parametrize("name", ["muril", "xlm_r", "modernbert", "gemma_3", "llama_3_2", "qwen_3"])
def test_the_tokens_of_words_are_those_of_their_sentence(tmp_path: Path, name: str) -> None:
    files: Any = getattr(encoders, name, None) or getattr(decoders, name)
    tokenizer: Any = AutoTokenizer.from_pretrained(write_files(tmp_path, files()))
    words = ["Ravi", "went", "to", "Pune"]
    table = pa.Table.from_pylist([{"words": words, "tags": ["O"] * 4, "language": "en", "line": 1}])
    found = tokenised_sentences({"train": Sentences(table, "t", "--train_file")}, ["O"], tokenizer, 64)["train"]
    text = tokenizer(" ".join(words))["input_ids"]
    assert tokenizer.decode(found["input_ids"][0]) == tokenizer.decode(text)
    assert sum(label == 0 for label in found["labels"][0]) == 4


def test_auto_is_the_length_of_all_but_a_few_sentences(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    lengths = [*range(3, 203), 900]
    lines = ["\n".join(f"{'ab'[word % 2]} {'B-X' if word else 'O'}" for word in range(length)) for length in lengths]
    (tmp_path / "t.conll").write_text("\n\n".join(lines), encoding="utf-8")
    recipe = read_recipe(
        ["--train_file", str(tmp_path / "t.conll"), "--max_length", "auto", "--validation_split", "0"], TASK.arguments
    )
    plan, problems = plan_of_rows(recipe, TASK)
    tokens = TASK.tokenise(plan, read_rows(plan, TASK, problems))
    assert tokens.max_length == 202 + 2  # with the special tokens
    assert "1 of 201 rows" not in caplog.text
    assert "--max_length auto: 204 tokens, the 99.5th percentile" in caplog.text
    assert max(tokens.train["length"][:]) == 204


def test_the_language_column_names_the_language(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"text": ["a", "b"], "label": ["O", "B"], "lang": given, "language": "x"} for given in ("mr", "", None)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = rows_of("--train_file", str(path), "--language_column", "lang")
    assert found.splits["train"].table["language"].to_pylist() == ["mr", "und-Latn", "und-Latn"]
    assert rows_of("--train_file", str(path)).splits["train"].table["language"].to_pylist() == ["x"] * 3
    with refusal("column-missing", f"{path}:1", "--language_column"):
        rows_of("--train_file", str(path), "--language_column", "tongue")


def test_a_tag_that_training_lacks_is_named_with_its_place(tmp_path: Path) -> None:
    for name, content in (("t", "a B-PER\nd B-ORG\n"), ("v", "b O\n\nc B-LOC\n")):
        (tmp_path / f"{name}.conll").write_text(content, encoding="utf-8")
    train, validation = (str(tmp_path / f"{name}.conll") for name in "tv")
    found = refused("--train_file", train, "--validation_file", validation)
    assert found == [("tag-unseen", f"{validation}:1"), ("tag-unseen", f"{validation}:3")]


def test_what_the_task_does_not_do_is_refused(tmp_path: Path) -> None:
    given = ["--dataset_name", "builtin:names", "--bad_rows", "quarantine", "--drop_leaked_rows"]
    given += ["--label_map", "a=b", "--keep_label_spellings", "--text_pair_column", "b"]
    recipe = read_recipe([*given, "--problem_type", "regression"], TASK.arguments)
    plan, _ = plan_of_rows(recipe, TASK)
    flags = "--bad_rows", "--drop_leaked_rows", "--problem_type"
    others = "--label_map", "--keep_label_spellings", "--text_pair_column"
    assert codes(preflight(plan, TASK)) == [("not-of-this-task", flag) for flag in (*flags, *others)]


def test_the_first_token_of_a_word_carries_its_tag(tmp_path: Path) -> None:
    (tmp_path / "t.conll").write_text("Thiruvananthapuram B-LOC\nhai O\n", encoding="utf-8")
    recipe = read_recipe(["--train_file", str(tmp_path / "t.conll"), "--max_length", "64"], TASK.arguments)
    plan, problems = plan_of_rows(recipe, TASK)
    (row,) = TASK.tokenise(plan, read_rows(plan, TASK, problems)).train
    tags = [tag for tag in row["labels"] if tag != -100]
    assert len(row["labels"]) == len(row["input_ids"]) == row["length"] > 4
    assert (tags, row["labels"][1], row["labels"][0], row["labels"][-1]) == ([0, 1], 0, -100, -100)
    assert row["language"] == "und-Latn"


def test_words_that_are_cut_off_are_counted_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.conll").write_text("a O\nb O\nc O\nd B-LOC\n\na O\n", encoding="utf-8")
    recipe = read_recipe(["--train_file", str(tmp_path / "t.conll"), "--max_length", "4"], TASK.arguments)
    plan, problems = plan_of_rows(recipe, TASK)
    dataset = TASK.tokenise(plan, read_rows(plan, TASK, problems)).train
    assert dataset["is_read"][:] == [[True, True, False, False], [True]]
    assert dataset["tags"][:] == [[1, 1, 1, 0], [1]]
    assert "1 of 2 rows (50.0%) reach --max_length 4" in caplog.text


@pytest.mark.parametrize("head", [TASK.head, "ForSequenceClassification"])
def test_a_model_that_has_the_tags_keeps_their_order(tmp_path: Path, head: str) -> None:
    (tmp_path / "t.conll").write_text("a O\nb B-LOC\nc B-PER\n", encoding="utf-8")
    names = {0: "O", 1: "B-PER", 2: "B-LOC"}
    config = BertConfig(architectures=[f"Bert{head}"], id2label=names, label2id={name: n for n, name in names.items()})
    recipe = read_recipe(["--train_file", str(tmp_path / "t.conll")], TASK.arguments)
    plan, problems = plan_of_rows(recipe, TASK)
    rows = read_rows(replace(plan, model_config=config), TASK, problems)
    assert rows.tags == ["O", "B-PER", "B-LOC"]
    (row,) = TASK.tokenise(plan, rows).train
    assert row["tags"] == [0, 2, 1]


def test_labels_are_smoothed_as_asked(tmp_path: Path) -> None:
    (tmp_path / "t.conll").write_text("a O\nSita B-PER\n", encoding="utf-8")
    given = ["--train_file", str(tmp_path / "t.conll"), "--label_smoothing_factor", "0.25"]
    plan, problems = plan_of_rows(read_recipe(given, TASK.arguments), TASK)
    rows = read_rows(plan, TASK, problems)
    assert TASK.objective(plan.training, BertConfig(), rows.tokenizer, True, rows).loss.label_smoothing == 0.25


def test_the_evaluate_command_refuses_to_leave_rows_out(tmp_path: Path) -> None:
    (tmp_path / "t.conll").write_text("a O\n", encoding="utf-8")
    values: dict[str, Any] = {"test_file": str(tmp_path / "t.conll"), "bad_rows": "quarantine", "label_map": ["a=b"]}
    plan, _ = plan_of_rows(read_recipe(["--train_file", values["test_file"]], TASK.arguments), TASK)
    evaluation: Any = plan
    evaluation = replace(evaluation, data=unresolved(EvaluationArguments, values))
    with refusal("not-of-this-task", "--label_map", flag="--bad_rows"):
        TASK.tokenise_test(evaluation, None, Problems())
