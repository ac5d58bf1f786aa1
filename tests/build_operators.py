"""Compile what DeepSpeed needs on a CPU, once: tests would wait for it in the midst of runs that are killed meanwhile.

python -m tests.build_operators
"""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator

OPERATORS = ("ShareMemCommBuilder", "CPUAdamBuilder")  # what ranks talk by, and the optimizer of an offload

if __name__ == "__main__":
    if get_accelerator().device_name() == "cpu":
        for operator in OPERATORS:
            get_accelerator().create_op_builder(operator).load(verbose=False)
