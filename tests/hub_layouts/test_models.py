"""Each published layout of a model, by real runs that ask a Hub on this machine; the results are a table of `docs`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hub_layouts.conftest import Place
from tests.hub_layouts.models import DECODERS, ENCODERS
from tests.hub_layouts.tiny import WORDS

RESULTS = Path(__file__).parent / "models.json"
TWEETS: list[dict[str, Any]] = [
    {"text": f"{WORDS[n % 7]} {n}", "label": ("good", "bad")[n % 2], "language": "hi"} for n in range(24)
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": WORDS[n % 7]}, {"role": "assistant", "content": WORDS[(n + 1) % 7]}]}
    for n in range(16)
]
SHORT = ("--max_steps", "2", "--max_length", "48", "--num_train_epochs", "1", "--save_strategy", "no")
STEPS = ("--global_batch_size", "8", "--per_device_train_batch_size", "4", "--eval_strategy", "no")


def codes(said: str) -> list[str]:
    """The codes of the problems in a message."""
    return re.findall(r"\[([a-z]+(?:-[a-z0-9]+)+)\]", said)


def tried(place: Place, name: str, script: str, *flags: str) -> dict[str, Any]:
    """What a model does: True, or the codes of the refusal. The second run has no network, and names the commit."""
    folder = place.folder / name.replace("/", "--")
    common = (script, "--model_name_or_path", name, *SHORT, *STEPS, *flags)
    first = place.run(*common, "--output_dir", str(folder / "full"))
    found: dict[str, Any] = {"trains": first.returncode == 0 or codes(first.stderr)}
    if first.returncode != 0:
        return found | {"said": first.stderr[-3000:]}
    found["padding_free"] = "Padding rows" not in first.stderr
    lora = ("--method", "lora", "--model_revision", place.commits[name], "--output_dir", str(folder / "lora"))
    second = place.run(*common, *lora, online=False)
    found["adapter"] = second.returncode == 0 or codes(second.stderr) or second.stderr[-3000:]
    merged = place.run("merge", str(folder / "lora"), "--output_dir", str(folder / "merged"), online=False)
    found["merges"] = merged.returncode == 0 or codes(merged.stderr) or merged.stderr[-3000:]
    return found


@pytest.mark.more
@pytest.mark.parametrize("name", ENCODERS)
def test_a_classifier(place: Place, name: str) -> None:
    rows = place.rows("tweets.jsonl", TWEETS)
    trust = ("--trust_remote_code", "true") if "v3" in name else ()
    found = tried(place, name, "scripts/train_sentiment.py", "--train_file", rows, *trust)
    folder = place.folder / name.replace("/", "--") / "lora"
    predicted = place.run("predict", str(folder), WORDS[0], *trust, online=False)
    found["predicts"] = predicted.returncode == 0 or codes(predicted.stderr) or predicted.stderr[-3000:]
    assert found == json.loads(RESULTS.read_text(encoding="utf-8"))[name]


@pytest.mark.more
@pytest.mark.parametrize("name", DECODERS)
def test_a_language_model(place: Place, name: str) -> None:
    rows = place.rows("chats.jsonl", CHATS)
    found = tried(place, name, "scripts/train_llama.py", "--train_file", rows)
    assert found == json.loads(RESULTS.read_text(encoding="utf-8"))[name]
