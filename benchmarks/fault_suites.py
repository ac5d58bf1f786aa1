"""Rows of the fault scoreboard that our tests try: files, flags and names, a server, and what leaves the machine."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.fault_runs import Found
from tests.ranks.launching import ROOT

SUITES = {
    "11": ("tests/test_bad_input.py", "tests/test_bad_chats.py", "tests/distributed/test_launch_check.py"),
    "12": ("tests/faults/test_bad_data.py",),
    "14": ("tests/faults/test_canaries.py",),
    "15": ("tests/faults/test_tokens.py",),
    "16": ("tests/faults/test_hostile_names.py",),
    "18": ("tests/serving/test_public_server.py", "tests/serving/test_limits.py"),
    "19": ("tests/hub/test_no_texts.py", "tests/first_hour/test_vocabulary.py", "tests/commands/test_export_onnx.py"),
}


def count_tests(files: tuple[str, ...], work: Path) -> Found:
    """Run test files with pytest; count the outcomes of each file.

    Args:
        files: paths from the repository's root.
        work: folder for the report.

    Raises:
        RuntimeError: pytest could not run.
    """
    found: Found = {}
    for number, file in enumerate(files):
        report = work / f"report-{number}.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode > 1:  # 1: a test failed
            raise RuntimeError(f"{file}: {(done.stdout + done.stderr)[-1000:]}")
        outcomes = Counter[str]()
        for case in ElementTree.parse(report).iter("testcase"):
            tags = {each.tag for each in case} & {"failure", "error", "skipped"}
            outcomes[min(tags) if tags else "passed"] += 1
        found[Path(file).stem] = dict(outcomes)
    return found
