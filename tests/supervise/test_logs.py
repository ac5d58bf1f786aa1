"""Output of the ranks on the console and in their logs."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from indictune.supervise.run_folder import ConsoleHandler
from tests.ranks.launching import start


def test_rank_0_names_the_level_of_warnings_and_leaves_details_out() -> None:
    stream, logger = io.StringIO(), logging.Logger("rank 0")
    logger.addHandler(ConsoleHandler(stream))
    logger.debug("a detail")
    logger.info("step %d of %d", 1, 8)
    logger.warning("disk is nearly full")
    logger.error("no space left")
    said = stream.getvalue().splitlines()
    assert said == ["step 1 of 8", "warning: disk is nearly full", "error: no space left"]


SPEAK = """
import logging, os, sys, warnings
from contextlib import suppress
from pathlib import Path
from indictune.supervise.run_folder import RankLog
rank = int(sys.argv[2])
log = RankLog(Path(sys.argv[1]), rank, verbose=sys.argv[3] == "verbose")
ours, theirs = logging.getLogger("indictune.models"), logging.getLogger("DeepSpeed")
ours.info("step of rank %d", rank)
ours.warning("seen by rank %d", rank)
theirs.warning("chatter of a library")
url = "https://me:LoginCanary@host/model?X-Amz-Signature=SignatureCanary&X-Amz-Date=1"
logging.getLogger("httpx2").info("HTTP Request: GET %s", url)
logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting %s", url)
ours.warning("cannot be reached: %s", url)
print("a print")
for descriptor in (1, 2):
    with suppress(OSError):
        os.write(descriptor, f"C++ to {descriptor}\\n".encode())
warnings.warn("a python warning")
print("a result", file=log.results)
print("a progress bar", file=sys.stderr)
for descriptor in log.descriptors:
    with suppress(OSError):
        os.write(descriptor, b"a signal\\n")
"""


URL = "https://(a login)@host/model?X-Amz-Signature=(hidden)&X-Amz-Date=1"  # as it is shown


def speak(folder: Path, rank: int, verbose: str = "quiet") -> subprocess.CompletedProcess[str]:
    result = start([sys.executable, "-c", SPEAK, str(folder), str(rank), verbose])
    assert result.returncode == 0, result.stderr
    return result


def test_the_console_gets_our_words_and_the_rank_files_get_everything(tmp_path: Path) -> None:
    first, second = speak(tmp_path, 0), speak(tmp_path, 1)
    assert first.stdout == "a result\n"
    assert first.stderr.splitlines() == [
        "step of rank 0", "warning: seen by rank 0",
        f"warning: cannot be reached: {URL}", "a progress bar", "a signal",
    ]  # fmt: skip
    assert second.stdout == "a result\n"
    assert second.stderr == ""
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        for line in (
            f"INFO indictune.models: step of rank {rank}\n",
            f"WARNING indictune.models: seen by rank {rank}\n",
            "WARNING DeepSpeed: chatter of a library\n",
            f"WARNING huggingface_hub.utils._http: thrown while requesting {URL}\n",
            f"WARNING indictune.models: cannot be reached: {URL}\n",
            "a print\n",
            "C++ to 1\n",
            "C++ to 2\n",
            "a python warning\n",
            "a signal\n",
        ):
            assert log.count(line) == 1, line
        assert log.count("requesting") == 1
        assert "HTTP Request" not in log
        assert "Canary" not in log + first.stderr
    assert "a progress bar" in (tmp_path / "logs" / "rank-1.log").read_text(encoding="utf-8")


@pytest.mark.more
def test_a_console_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", SPEAK, str(tmp_path), "0", "quiet"]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    log = (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert result.returncode == 0, log
    assert result.stdout == "a result\n"
    assert "a python warning" in log


@pytest.mark.more
def test_a_log_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    result = speak(tmp_path, 0)
    assert result.stdout == "a result\n"
    assert "warning: seen by rank 0" in result.stderr.splitlines()


def test_a_new_run_keeps_the_old_log(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").write_text("of the run before\n")
    speak(tmp_path, 0, "verbose")
    assert (tmp_path / "logs" / "rank-0.log").read_text().startswith("of the run before\n")


def test_verbose_leaves_the_libraries_on_the_console(tmp_path: Path) -> None:
    result = speak(tmp_path, 0, "verbose")
    assert sorted(result.stdout.splitlines()) == ["C++ to 1", "a print", "a result"]
    for words in ("chatter of a library", f"thrown while requesting {URL}", "C++ to 2", "a python warning"):
        assert words in result.stderr
    assert "Canary" not in result.stderr
    assert "chatter of a library" in (tmp_path / "logs" / "rank-0.log").read_text(encoding="utf-8")
