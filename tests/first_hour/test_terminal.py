"""The screen of a terminal of 80 columns, as a user sees it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pyte
import pytest

from indictune.cli import main
from tests.first_hour.saved_models import saved_classifier
from tests.ranks.launching import ROOT

COLUMNS, LINES = 80, 200


class Terminal:
    """A program in a terminal, and what the screen shows."""

    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = ["-m", "indictune", *words]
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.stream = pyte.Stream(self.screen)
        self.program = pexpect.spawn(
            sys.executable,
            command,
            cwd=str(ROOT),
            env=environment,
            encoding="utf-8",
            timeout=120,
            dimensions=(LINES, COLUMNS),
        )

    def until(self, text: str) -> None:
        self.program.expect(text)
        self._show()

    def end(self) -> int | None:
        self.program.expect(pexpect.EOF)
        self._show()
        self.program.close()
        code: int | None = self.program.exitstatus
        return code

    def _show(self) -> None:
        after = self.program.after
        self.stream.feed(self.program.before + (after if isinstance(after, str) else ""))

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]


@pytest.mark.more
def test_a_run_that_is_interrupted_in_its_bar_says_so_on_a_line_of_its_own(tmp_path: Path) -> None:
    terminal = Terminal("train", "recipes/sentiment/demo.yaml", "--output_dir", str(tmp_path / "out"))
    terminal.until(r"\d+/444 \[")
    terminal.program.send("\x03")
    assert terminal.end() == 75
    lines = terminal.lines
    (last,) = [line for line in lines if line.startswith("indictune: ") and "the same as" not in line]
    assert "[" not in last.partition("indictune: ")[0]
    assert not any("indictune: " in line and not line.startswith("indictune: ") for line in lines)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.more
def test_a_finished_run_leaves_a_readable_screen(tmp_path: Path) -> None:
    flags = ["--output_dir", str(tmp_path / "out"), "--max_steps", "8", "--logging_steps", "4"]
    terminal = Terminal("train", "recipes/sentiment/demo.yaml", *flags)
    assert terminal.end() == 0
    lines = terminal.lines
    for beginning in ("Training on ", "rows: ", "step 4 of 8: loss", "step 8 of 8: loss", "test rows", "Written to "):
        assert any(line.startswith(beginning) for line in lines), (beginning, lines)
    bars = [line for line in lines if "/8 [" in line]
    assert len(bars) <= 1, bars
    assert all(sum(text in line for text in ("it/s", "step ", "eval")) <= 1 for line in lines)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["predict", "--help"], ["recipes"]], ids=" ".join)
def test_help_fits_80_columns(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    assert main(words) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.slow
def test_the_bar_of_predict_shows_speed_and_time_left_on_one_line(tmp_path: Path) -> None:
    model, rows = saved_classifier(tmp_path / "model"), 12_500
    (tmp_path / "in.txt").write_text("बहुत अच्छी फिल्म थी\n" * rows, encoding="utf-8")
    files = ["--input_file", str(tmp_path / "in.txt"), "--output_file", str(tmp_path / "out.csv")]
    terminal = Terminal("predict", str(model), *files)
    terminal.until(r"4096/12500 \[\d\d:\d\d<\d\d:\d\d, *[\d.]+ rows/s\]")
    assert sum("rows/s" in line for line in terminal.lines) == 1
    assert terminal.end() == 0
    bar, end, written, *_ = terminal.lines
    assert "12500/12500 [" in bar
    assert end.startswith("12,500 rows in ")
    assert written.startswith("Written to ")
    assert sum("rows/s" in line for line in terminal.lines) == 2
