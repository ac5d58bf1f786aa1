"""Compile what DeepSpeed needs on a CPU, once: tests would wait for it in the midst of runs that are killed meanwhile.

python -m tests.build_operators
"""

from __future__ import annotations

import os

from deepspeed.accelerator import get_accelerator

from tests.ranks.launching import path

OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder")  # what ranks talk by, and the optimizer of an offload


def build() -> None:
    """Compile by the programs that the tests take."""
    os.environ["PATH"] = path()
    if get_accelerator().device_name() == "cpu":
        for operator in OPERATORS:
            get_accelerator().create_op_builder(operator).load(verbose=False)


if __name__ == "__main__":
    build()
