"""Rank 0 waits in a `long_wait_group` for rank 1, which ends. Rank 0 writes to FILE how long it waited.

torchrun --nproc_per_node 2 tests/distributed/long_wait.py FILE
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from transformers import TrainingArguments

from indictune.distributed import collectives

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the other rank ends
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=600))
    args = TrainingArguments(sys.argv[1], use_cpu=True)
    assert args.world_size == 2
    long_wait = collectives.long_wait_group(args)
    if os.environ["RANK"] == "1":
        os._exit(1)  # during the long work
    since = time.monotonic()
    try:
        collectives.from_rank_0(None, long_wait)
    except RuntimeError as error:
        Path(sys.argv[1]).write_text(f"{time.monotonic() - since:.1f} {error}", encoding="utf-8")
    os._exit(1)
