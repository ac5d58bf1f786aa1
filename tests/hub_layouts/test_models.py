"""Each published layout of a model, by real runs that ask a Hub on this machine; the results are a table of `docs`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.hub_layouts.conftest import Place
from tests.hub_layouts.models import DECODERS, ENCODERS, LAYOUTS
from tests.hub_layouts.tiny import WORDS

RESULTS = Path(__file__).parent / "models.json"
TWEETS: list[dict[str, Any]] = [
    {"text": f"{WORDS[n % 7]} {n}", "label": ("good", "bad")[n % 2], "language": "hi"} for n in range(24)
]
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": WORDS[n % 7]}, {"role": "assistant", "content": WORDS[(n + 1) % 7]}]}
    for n in range(16)
]
SHORT = (
    *("--max_steps", "2", "--max_length", "96", "--save_strategy", "no", "--eval_strategy", "no"),
    *("--global_batch_size", "8", "--per_device_train_batch_size", "4"),
)

MORE = {"ai4bharat/IndicBERTv2-MLM-only", "answerdotai/ModernBERT-base", "ai4bharat/IndicBERT-v3-270M"}
MORE |= {"sarvamai/sarvam-1", "meta-llama/Llama-3.2-1B-Instruct"}


def marked(names: Iterable[str]) -> list[Any]:
    """Each name; `make test-more` runs those of `MORE`, and the others are slow."""
    return [pytest.param(name, marks=pytest.mark.more if name in MORE else pytest.mark.slow) for name in names]


def codes(said: str) -> list[str]:
    """The codes of the problems in a message."""
    return re.findall(r"\[([a-z]+(?:-[a-z0-9]+)+)\]", said)


def outcome(place: Place, *words: str, online: bool = False) -> Any:
    """True for a command that succeeds; else the codes of its problems, or the end of what it said."""
    done = place.run(*words, online=online)
    return done.returncode == 0 or codes(done.stderr) or done.stderr[-2000:]


def tried(place: Place, name: str, script: str, *flags: str) -> dict[str, Any]:
    """What a model does. All after the first run has no network; the adapter names the commit."""
    folder = place.folder / name.replace("/", "--")
    common = (f"scripts/train_{script}.py", "--model_name_or_path", name, *SHORT, *flags)
    found: dict[str, Any] = {"command": script, "layout": LAYOUTS[name]}
    first = place.run(*common, "--output_dir", str(folder / "full"))
    found["trains"] = first.returncode == 0 or codes(first.stderr) or first.stderr[-2000:]
    found["padding_free"] = "Padding rows" not in first.stderr
    lora = ("--method", "lora", "--model_revision", place.commits[name], "--output_dir", str(folder / "lora"))
    trust = flags[flags.index("--trust_remote_code") :] if "--trust_remote_code" in flags else ()
    found["adapter"] = outcome(place, *common, *lora)
    found["merges"] = outcome(place, "merge", str(folder / "lora"), "--output_dir", str(folder / "merged"), *trust)
    return found


def check(name: str, found: dict[str, Any]) -> None:
    """Compare with the recorded results. Those of a model without an entry are recorded, and the test fails once."""
    recorded = json.loads(RESULTS.read_text(encoding="utf-8"))
    if name not in recorded:
        RESULTS.write_text(json.dumps(recorded | {name: found}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert found == recorded.get(name)


@pytest.mark.parametrize("name", marked(ENCODERS))
def test_a_classifier(place: Place, name: str) -> None:
    trust = ("--trust_remote_code", "true") if name == "ai4bharat/IndicBERT-v3-270M" else ()
    found = tried(place, name, "sentiment", "--train_file", place.rows("tweets.jsonl", TWEETS), *trust)
    folder = place.folder / name.replace("/", "--")
    found["predicts"] = outcome(place, "predict", str(folder / "lora"), "--text", WORDS[0], *trust)
    found["exports"] = outcome(place, "export", str(folder / "full"), "--output_dir", str(folder / "onnx"), *trust)
    check(name, found)


@pytest.mark.parametrize("name", marked(DECODERS))
def test_a_language_model(place: Place, name: str) -> None:
    template = ("--chat_template", "tulu") if name == "ai4bharat/Airavata" else ()
    found = tried(place, name, "llama", "--train_file", place.rows("chats.jsonl", CHATS), *template)
    folder = place.folder / name.replace("/", "--")
    found["answers"] = outcome(place, "tests/hub_layouts/answer.py", str(folder / "lora"), WORDS[0])
    check(name, found)
