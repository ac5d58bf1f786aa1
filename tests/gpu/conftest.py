"""GPU tests use the job of the 2-rank tests. Without a GPU they are skipped; under `make test-gpu` they fail."""

from __future__ import annotations

import os

import pytest
import torch

from tests.ranks.conftest import job, run_under

__all__ = ["job", "run_under"]


class _Failures:
    """Prints each failure at once, because a run that reaches a time limit prints no summary.

    Args:
        terminal: pytest's reporter.
    """

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


@pytest.hookimpl(trylast=True)  # the terminal registers itself at this hook
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and "REQUIRE_GPU" in os.environ:  # xdist's workers have none
        config.pluginmanager.register(_Failures(terminal))


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if torch.cuda.is_available():
        return
    if "REQUIRE_GPU" in os.environ:
        pytest.fail("torch finds no GPU, so nothing is tested.", pytrace=False)
    pytest.skip("no GPU")
