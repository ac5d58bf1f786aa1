"""Run a training script, and log each time the host waits for the GPU.

python tests/gpu/waiting.py SCRIPT FLAGS...
"""

from __future__ import annotations

import runpy
import sys
import warnings

import torch

if __name__ == "__main__":
    warnings.simplefilter("always")  # each time, not once a line
    torch.cuda.set_sync_debug_mode("warn")
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
