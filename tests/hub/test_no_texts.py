"""What is found in rows goes to the Hub without their texts and words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers.normalizers import Replace

from indictune.cli import main
from indictune.config.arguments import DataArguments, ModelArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.data.health.row_health import measure
from indictune.data.load_rows import load_splits
from indictune.errors import Problems
from indictune.models.load import load_tokenizer
from indictune.models.task_models import with_vocabulary
from tests.data.test_unknown_tokens import tokenizer_of
from tests.faults.hub import Hub
from tests.hub.folders import METRICS, RECIPE, model_folder, write_weights

SECRETS = ("zsecreta", "zsecretb", "zsecretc", "zsecretd", "zsecrete")
FOUND = {"mojibake", "unknown_tokens", "token_collisions", "label_sources"}
WRONG = "à¤«à¤¿à¤²à¥\u008dà¤®"


def test_a_push_has_no_text_or_word_of_a_row(server: Hub, tmp_path: Path) -> None:
    """Of a wrong decoding, an unknown word, two words with the same tokens, a first word, and a row left out."""
    source, chats = tmp_path / "train.jsonl", tmp_path / "chats.jsonl"
    texts = [f"{SECRETS[0]} {WRONG}", f"b {SECRETS[1]}", *[f"{SECRETS[3]} b {SECRETS[2]}"] * 90, *["b b", "b c"] * 50]
    rows = [{"text": text, "label": "yes" if SECRETS[3] in text else "no"} for text in texts]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    talk = [[{"role": role, "content": "a"}, {"role": "assistant", "content": "b"}] for role in ("user", SECRETS[4])]
    chats.write_text("".join(json.dumps({"messages": each}) + "\n" for each in talk), encoding="utf-8")

    splits = load_splits(DataArguments(train_file=str(source)))
    tokenizer = tokenizer_of("b", SECRETS[3])
    tokenizer.backend_tokenizer.normalizer = Replace(SECRETS[2], "b")
    health = measure(splits.rows, tokenizer, 9, splits.findings)
    assert {each.name for each in health.findings} >= FOUND
    assert all(secret in str(health) for secret in SECRETS[:4])

    args = ChatDataArguments(train_file=str(chats), bad_rows="quarantine", max_bad_fraction=0.5)
    left_out = load_conversations(chat_sources(args, Problems()), args)
    assert SECRETS[4] in (left_out.folder / "rejected.jsonl").read_text(encoding="utf-8")
    notes = [*splits.notes, *[each.note for each in health.findings], *left_out.notes]
    folder = model_folder(tmp_path / "out", METRICS | {"data": METRICS["data"] | {"notes": notes}})
    write_weights(folder)
    (folder / "health.json").write_text(json.dumps(health.as_json()), encoding="utf-8")
    (folder / "report.html").write_text(str(health), encoding="utf-8")
    assert main(["push", str(folder), "me/out"]) == 0
    assert {"README.md", "metrics.json", "report.html"} <= server.files.keys()
    sent = b"".join(server.files.values()).decode(errors="replace")
    assert "train.jsonl:1" in sent
    assert [secret for secret in (*SECRETS, WRONG[:6]) if secret in sent] == []


def test_a_push_has_no_number_name_or_rare_word_of_a_row(server: Hub, tmp_path: Path) -> None:
    """A learned vocabulary has the words of many rows alone, and the card says how many pieces there are."""
    texts = [f"yes 9876543210 @qzravi ९८७६५ qzkumar@example.in {n * 'b'}" for n in range(9)]
    texts += [*[f"qxfew {n * 'b'}" for n in range(4)], *["qvrepeated"] * 9]
    source, args = tmp_path / "train.jsonl", ModelArguments(vocabulary_from_train=2_000)
    rows = [{"text": text, "label": text[:1]} for text in texts]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    cleaned = load_splits(DataArguments(train_file=str(source))).rows["train"].texts
    _, tokenizer = with_vocabulary(args, load_tokenizer(ModelArguments()), cleaned, None)
    folder = model_folder(tmp_path / "out", recipe=f"{RECIPE}vocabulary_from_train: 2000\n")
    write_weights(folder)
    tokenizer.save_pretrained(folder)

    assert main(["push", str(folder), "me/out"]) == 0
    pieces = [each for each in tokenizer.get_vocab() if len(each.removeprefix("##")) > 1 and each[0] != "["]
    assert {"yes", "user"} <= set(pieces)
    assert not [each for each in pieces if any(map(str.isdigit, each)) or {*"qzxv"} & {*each}]
    sent = json.loads(server.files["tokenizer.json"])["model"]["vocab"]
    assert sent == tokenizer.get_vocab()
    assert f" {len(pieces)} pieces " in server.files["README.md"].decode()
