"""The cache of built-in models."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from indictune.models import builtin
from tests.refusals import refused

TEXTS = ["खाना अच्छा है 😀", "సినిమా బాగుంది", "படம் நன்று", "bahut accha laga 🎉"] * 3
BERT = "builtin:tiny-indic-bert"
SMALL = builtin.BuiltIn(
    lambda: TEXTS,
    partial(
        builtin.build_tiny_bert,
        size=builtin.Size(hidden_size=64, num_layers=1, vocab_size=1200, max_length=32),
    ),
)


@pytest.fixture
def tweets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A few tweets instead of the built-in ones, a small size, and an empty cache."""
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", SMALL)
    return tmp_path / "cache"


def kept(cache: Path) -> list[Path]:
    """What is in the cache, but for locks."""
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_it_is_built_once_and_then_read(tweets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = builtin.resolve(BERT)
    assert Path(folder).parent == tweets
    again = dataclasses.replace(SMALL, build=lambda *_: pytest.fail("built twice"))
    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", again)
    assert builtin.resolve(BERT) == folder
    assert kept(tweets) == [Path(folder)]


@pytest.mark.parametrize(
    "changed", [dataclasses.replace(SMALL, texts=lambda: [*TEXTS, "नया"]), dataclasses.replace(SMALL, version=2)]
)
def test_whatever_it_is_made_from_names_its_folder(
    tweets: Path, monkeypatch: pytest.MonkeyPatch, changed: builtin.BuiltIn
) -> None:
    before = builtin.resolve(BERT)
    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", changed)
    assert builtin.resolve(BERT) != before


def test_without_locks_a_process_that_comes_second_takes_the_folder_of_the_first(
    tweets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_while_another_finishes(texts: Sequence[str], folder: Path) -> None:
        SMALL.build(texts, folder)
        name = folder.parent.name.removeprefix(".").rpartition("-")[0]
        (tweets / name).mkdir()
        (tweets / name / "config.json").write_text("of the first")

    slow = dataclasses.replace(SMALL, build=build_while_another_finishes)
    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", slow)
    folder = Path(builtin.resolve(BERT))
    assert (folder / "config.json").read_text() == "of the first"
    assert kept(tweets) == [folder]


def test_a_build_that_breaks_leaves_nothing(tweets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(texts: Sequence[str], folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", dataclasses.replace(SMALL, build=broken))
    with pytest.raises(OSError, match="disk full"):
        builtin.resolve(BERT)
    assert kept(tweets) == []


def test_an_unwritable_cache_is_reported_with_its_variable(tweets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setitem(builtin.MODELS, "tiny-indic-bert", dataclasses.replace(SMALL, build=refuse))
    with refused("cache-not-written", "The model", str(tweets), "Read-only file system"):
        builtin.resolve(BERT)
    shutil.rmtree(tweets)
    tweets.touch()
    with refused("cache-not-written", "File exists"):
        builtin.resolve(BERT)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with refused("no-such-name", "builtin:huge", "builtin:tiny-indic-bert"):
        builtin.resolve("builtin:huge")


def test_other_names_are_left_alone() -> None:
    assert builtin.resolve("ai4bharat/IndicBERTv2-MLM-only") == "ai4bharat/IndicBERTv2-MLM-only"
