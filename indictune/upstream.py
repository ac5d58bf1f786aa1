"""Private names of other libraries that only one or two modules of a package need.

`training`, `distributed` and `models` have an `upstream.py` of their own. tests/training/test_contract.py holds every
name, and says what to do when one goes. Libraries are imported inside the functions: `config` imports this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2
    from datasets import Dataset
    from sacrebleu.metrics.chrf import CHRF
    from transformers import PreTrainedConfig, TrainingArguments


def commit_of(config: PreTrainedConfig) -> str | None:
    """The commit on the Hub that a configuration was read from (transformers 5.23); None for a local folder.

    `to_dict` leaves it out.
    """
    commit: str | None = vars(config).get("_commit_hash")
    return commit


def check_combination(training: TrainingArguments) -> None:
    """Let transformers (5.23) check the combination of training arguments.

    Its own call comes only after the rows are prepared.

    Raises:
        ValueError: arguments contradict each other.
    """
    training._validate_args()  # type: ignore[no-untyped-call]


def numbers_in(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the numbers that stand in strings, as transformers (5.23) reads `--lr_scheduler_kwargs`."""
    from transformers.training_args import _convert_str_dict

    return dict(_convert_str_dict(settings))


def digest_of_split(rows: Dataset) -> str:
    """The digest that `datasets` (5.2) computes from the files of a split, their commit and how they are read."""
    return str(rows._fingerprint)


def hub_client() -> httpx2.Client:
    """A client as huggingface_hub (2.4) makes it. Its public `set_client_factory` takes a factory and gives none."""
    from huggingface_hub.utils._http import default_client_factory

    return default_client_factory()


def chrf_counts(metric: CHRF, answers: Sequence[str], references: Sequence[str]) -> list[list[int]]:
    """Counts of n-grams of each answer, [rows][counts]. sacreBLEU (2.6) gives only scores of a whole corpus."""
    counts: list[list[int]] = metric._extract_corpus_statistics(answers, [references])
    return counts


def chrf_of(metric: CHRF, counts: list[Any]) -> float:
    """chrF from 0 to 100 of summed `chrf_counts`, [counts]."""
    return metric._compute_f_score(counts)
