"""What is found in rows goes to the Hub without their texts and words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers.normalizers import Replace

from indictune.cli import main
from indictune.config.arguments import DataArguments
from indictune.config.chat_arguments import ChatDataArguments
from indictune.data.chat.conversations import chat_sources, load_conversations
from indictune.data.health.row_health import measure
from indictune.data.load_rows import load_splits
from indictune.errors import Problems
from tests.data.test_unknown_tokens import tokenizer_of
from tests.faults.hub import Hub
from tests.hub.folders import METRICS, model_folder

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
    (folder / "model.safetensors").write_bytes(b"w")
    (folder / "health.json").write_text(json.dumps(health.as_json()), encoding="utf-8")
    (folder / "report.html").write_text(str(health), encoding="utf-8")
    assert main(["push", str(folder), "me/out"]) == 0
    assert {"README.md", "metrics.json", "report.html"} <= server.files.keys()
    sent = b"".join(server.files.values()).decode(errors="replace")
    assert "train.jsonl:1" in sent
    assert [secret for secret in (*SECRETS, WRONG[:6]) if secret in sent] == []
