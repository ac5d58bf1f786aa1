"""Where a benchmark ran: the environment in every result file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from indictune.upstream import versions_of

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "datasets")
RESULTS = Path(__file__).with_name("results")


def environment() -> dict[str, Any]:
    """Hardware, versions, date and commit; without a git checkout, the commit is `$BENCHMARK_COMMIT`."""
    # Result files of earlier programs do not count as changes.
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)benchmarks/results")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _git("rev-parse", "HEAD") or os.environ.get("BENCHMARK_COMMIT"),
        "changed_since": None if changes is None else bool(changes),
        "load_average": os.getloadavg(),
        "cpu": _cpu_name(),
        "cpu_cores": torch.multiprocessing.cpu_count(),
        "gpus": gpus,
        "python": platform.python_version(),
        "versions": versions_of(PACKAGES),
    }


def _git(*words: str) -> str | None:
    """The output of git, or None without git or a checkout."""
    try:
        done = subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    """The processor's model name (Linux)."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def results_path(name: str, folder: Path = RESULTS) -> Path:
    """`<date>-<hardware>-<name>.json` in a folder."""
    about = environment()
    hardware = " ".join([*about["gpus"][:1]] or [about["cpu"], str(about["cpu_cores"]), "cores"])
    words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(r\)|\(tm\)|cpu|@.*?ghz", "", hardware.lower())).strip("-")
    return folder / f"{about['date']}-{words}-{name}.json"


def write_results(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write results to `results_path`; return the path."""
    path = results_path(name, folder)
    write(path, results)
    return path


def write(path: Path, results: dict[str, Any]) -> None:
    """Write or rewrite a result file."""
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
