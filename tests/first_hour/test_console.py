"""What a run writes on the console: lines in a file or a pipe, and a bar on a terminal of 80 columns."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest
import yaml

from indictune.console_text import line_start
from tests.conftest import FinishedRun
from tests.ranks.launching import ROOT, SCRIPT, path, python, start


def terminal(columns: int = 80) -> tuple[int, int]:
    """Both ends of a pseudo-terminal: the screen's and the program's."""
    screen, program = os.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return screen, program


def shown(written: str) -> list[str]:
    """The lines that stand on the screen at the end: a carriage return begins a line again, over what stands there."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        for part in line.split("\r"):
            cells[: len(part)] = part
        lines.append("".join(cells).rstrip())
    return lines


def flags_of(out: Path) -> list[str]:
    """60 rows in batches of 16, once: 4 steps, with the default of --logging_steps."""
    rows = (ROOT / "indictune/data/samples/train.jsonl").read_text(encoding="utf-8").splitlines()[:60]
    train = out.with_suffix(".jsonl")
    train.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    sizes = ["--global_batch_size", "16", "--max_length", "32", "--num_train_epochs", "1", "--save_strategy", "no"]
    return [*sizes, "--load_best_model_at_end", "false", "--train_file", str(train), "--output_dir", str(out)]


def test_a_pipe_gets_lines_and_no_bar(finished_run: FinishedRun) -> None:
    assert re.search(r"\r|it/s|%\|", finished_run.stderr + finished_run.stdout) is None
    steps = [line.partition(":")[0] for line in finished_run.stderr.splitlines() if line.startswith("step ")]
    evaluated = [f"step {step} of 8" for step in (4, 8)]
    assert sorted(steps) == sorted([*(f"step {step} of 8" for step in (2, 4, 6, 8)), *evaluated])


def test_an_evaluation_shows_loss_and_main_metric_in_one_line(finished_run: FinishedRun) -> None:
    lines = re.findall(r"^step (\d) of 8: validation loss [\d.]+, macro_f1 [\d.]+$", finished_run.stderr, re.M)
    assert lines == ["4", "8"]


def test_a_run_of_healthy_loss_warns_of_no_gradient(finished_run: FinishedRun) -> None:
    assert [line for line in finished_run.stderr.splitlines() if "grad" in line] == []


def test_the_active_vocabulary_is_one_short_line(finished_run: FinishedRun) -> None:
    lines = [line for line in finished_run.stderr.splitlines() if "vocabulary" in line]
    assert [len(line) < 70 for line in lines] == [True]


def test_the_recipe_of_a_run_begins_with_what_the_user_chose(finished_run: FinishedRun) -> None:
    written = (finished_run.folder / "recipe.yaml").read_text(encoding="utf-8")
    chosen, _, rest = written.partition("\n# ")
    given = [*yaml.safe_load(finished_run.recipe.read_text(encoding="utf-8")), "output_dir", "report"]
    assert list(yaml.safe_load(chosen)) == given
    others = list(yaml.safe_load(rest.partition("\n")[2]))
    assert others == sorted(others)
    assert {"seed", "weight_decay"} <= {*others}
    assert not {*others} & {*given}


def test_sixty_rows_show_their_loss(tmp_path: Path) -> None:
    result = start([*python(), SCRIPT, *flags_of(tmp_path / "out"), "--validation_split", "0"])
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"^step (\d) of 4: loss [\d.]+, [\d,.]+ rows/s, 0:00:\d\d left$", result.stderr, re.M)
    assert losses == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_on_a_terminal_the_last_line_begins_its_own_line(tmp_path: Path) -> None:
    """Memory runs out in the third step, while the bar is drawn."""
    screen, program = terminal()
    event = "ENOMEM@indictune.training.exact_trainer:ExactTrainer.training_step:6"
    flags = flags_of(tmp_path / "out")
    command = [*python(), "tests/faults/faulty.py", event, SCRIPT, *flags, "--per_device_train_batch_size", "8"]
    variables = {**os.environ, "PATH": path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=program, stderr=program) as process:
        os.close(program)
        written = read_all(screen)
    assert process.returncode == 1
    assert "%|" in written
    (said,) = [line for line in shown(written) if "out-of-memory" in line or "indictune:" in line][:1]
    assert said.startswith("indictune: Out of memory on the CPU after step 2")
    assert any(re.match(r"step 2 of 4: loss [\d.]+, ", line) for line in shown(written))


def read_all(screen: int) -> str:
    """What a program writes to its terminal until it closes it."""
    parts = []
    try:
        while part := os.read(screen, 4096):
            parts.append(part)
    except OSError:  # Linux reports the other end's close so
        pass
    os.close(screen)
    return b"".join(parts).decode()


@pytest.mark.parametrize("columns", [80, 20])
def test_a_line_begins_over_whatever_is_drawn(columns: int) -> None:
    screen, program = terminal(columns)
    drawn = "█" * (columns - 1)
    os.write(program, f"{drawn}{line_start(program)}said\n".encode())
    os.close(program)
    assert shown(read_all(screen)) == ["said", ""]


def test_a_pipe_needs_no_such_beginning() -> None:
    read, write = os.pipe()
    assert line_start(write) == ""
    os.close(read)
    os.close(write)
