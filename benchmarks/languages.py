"""How often a text of each real file is called English, by the detector in use and by lingua with all Latin languages.

    python -m benchmarks.languages DATA [--rows 1000] [--out DIR]

DATA has the folders `sentiment` and `sft`. English is the truth of the `sft` files alone. Tweets and comments in
Latin letters mix languages, and some of them are English: a lower share there is better, and zero is not the truth.
Each way runs in its own process. Rows per second include loading the models.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, environment, write_results
from indictune.console_text import table
from indictune.data.languages import LATIN, language_of_script, languages_of
from indictune.upstream import versions_of


def texts_of(data: Path, rows: int) -> dict[str, list[str]]:
    """Name of the set -> its texts; the first words of English ones stand for short texts."""
    tweets = {
        name: [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()][:rows]
        for name in ("hinglish_tweets", "tamil_codemix", "marathi_tweets")
        for file in [data / "sentiment" / f"{name}.validation.jsonl"]
    }
    lines = (data / "sft" / "xquad_hi.messages.jsonl").read_text(encoding="utf-8").splitlines()
    alpaca = json.loads((data / "sft" / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    english = [row["instruction"] for row in alpaca][:rows]
    short = {f"english, {n} words": [" ".join(text.split()[:n]) for text in english] for n in (3, 5)}
    hindi = [json.loads(line)["messages"][0]["content"] for line in lines][:rows]
    return {**tweets, "hindi questions": hindi, "english": english, **short}


def by_lingua_of_all_latin(texts: list[str]) -> list[str]:
    """The best guess of lingua among all its languages of Latin script."""
    from lingua import LanguageDetectorBuilder

    detector = LanguageDetectorBuilder.from_all_languages_with_latin_script().build()
    found = (detector.detect_language_of(text) for text in texts)
    return [language.iso_code_639_1.name.lower() if language else "none" for language in found]


def by_script(texts: list[str]) -> list[str]:
    """The script alone, without a detector."""
    return [language_of_script(text) for text in texts]


WAYS: dict[str, Callable[[list[str]], list[str]]] = {
    "in use": languages_of,
    "lingua, all Latin": by_lingua_of_all_latin,
    "script alone": by_script,
}


def measure(way: str, sets: dict[str, list[str]]) -> dict[str, Any]:
    """Shares of the languages in each set, rows per second over all sets, and peak memory of this process."""
    began = time.perf_counter()
    found = dict(zip(sets, _parts(WAYS[way]([text for texts in sets.values() for text in texts]), sets), strict=True))
    seconds = time.perf_counter() - began
    return {
        "rows_per_second": round(sum(map(len, sets.values())) / seconds),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "shares": {
            name: {word: round(n / len(languages), 4) for word, n in Counter(languages).most_common(5)}
            for name, languages in found.items()
        },
    }


def _parts(languages: list[str], sets: dict[str, list[str]]) -> list[list[str]]:
    rest = iter(languages)
    return [[next(rest) for _ in texts] for texts in sets.values()]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    sets = texts_of(args.data, args.rows)
    ways = {}
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            ways[way] = pool.apply(measure, (way, sets))
    rows = [
        (
            name,
            *(f"{ways[way]['shares'][name].get('en', 0):.1%}" for way in ("in use", "lingua, all Latin")),
            f"{ways['in use']['shares'][name].get(LATIN, 0):.1%}",
        )
        for name in sets
    ]
    print(table(("called English", "in use", "lingua, all Latin", LATIN), rows))
    for way, numbers in ways.items():
        print(f"{way}: {numbers['rows_per_second']:,} rows/s, {numbers['peak_memory_bytes'] / 1e6:,.0f} MB")
    versions = versions_of(["lingua-language-detector"])
    sizes = {name: len(texts) for name, texts in sets.items()}
    print(
        write_results("languages", {"environment": environment(), **versions, "rows": sizes, "ways": ways}, args.out)
    )


if __name__ == "__main__":
    main()
