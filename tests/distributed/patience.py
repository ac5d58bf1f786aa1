"""Two ranks, the second of which ends while the first waits for it in `patient_group`; the first says after how long.

torchrun --nproc_per_node 2 tests/distributed/patience.py FILE
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from transformers import TrainingArguments

from indictune.distributed import sharding

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which torchrun sends when the other has ended
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=600))
    args = TrainingArguments(sys.argv[1], use_cpu=True)
    assert args.world_size == 2
    patient = sharding.patient_group(args)
    if os.environ["RANK"] == "1":
        os._exit(1)  # amid what takes long
    since = time.monotonic()
    try:
        sharding.wait_for_all(patient)
    except RuntimeError as error:
        Path(sys.argv[1]).write_text(f"{time.monotonic() - since:.1f} {error}", encoding="utf-8")
    os._exit(1)
