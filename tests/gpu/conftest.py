"""The job of the 2-rank tests."""

from tests.distributed.conftest import job, run_under

__all__ = ["job", "run_under"]
