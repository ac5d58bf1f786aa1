"""The job of the 2-rank tests. Without a GPU every test here is skipped; one that `make test-gpu` has begun fails."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks.conftest import job, run_under

__all__ = ["job", "run_under"]


class _Failures:
    """Tells each failure when it comes: tests that are stopped by a limit of time would never tell it.

    Args:
        terminal: pytest's.
    """

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.hookimpl(trylast=True)  # the terminal registers itself at this hook
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and "REQUIRE_GPU" in os.environ:  # a process of xdist's has none: its tests are told here
        config.pluginmanager.register(_Failures(terminal))


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if torch.cuda.is_available():
        return
    if "REQUIRE_GPU" in os.environ:
        pytest.fail("torch finds no GPU, so nothing here is tested.", pytrace=False)
    pytest.skip("no GPU")
