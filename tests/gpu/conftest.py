"""The job of the 2-rank tests. Without a GPU every test here is skipped."""

import pytest
import torch

from tests.distributed.conftest import job, run_under

__all__ = ["job", "run_under"]


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
