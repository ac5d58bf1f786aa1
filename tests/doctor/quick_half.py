"""The quick half on each rank: sound, then with a wrong sum on rank 1. Rank 0 prints the seconds and the findings.

torchrun --nproc_per_node 2 tests/doctor/quick_half.py
"""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace
from typing import Any

import torch

from indictune.config.plan import Launch
from indictune.doctor.examination import check_ranks
from indictune.errors import UserError
from tests.doctor.planted import wrong_sum
from tests.plans import plan_of

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    args: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    plan = plan_of(launch=Launch("ddp", 2, 2, rank), model={"model_name_or_path": "builtin:tiny-indic-bert"})
    seconds, warnings = [], []
    for _ in range(3):  # other programs are on this machine too
        began = time.perf_counter()
        warnings += check_ranks(plan, args)
        seconds.append(time.perf_counter() - began)
    if rank == 1:
        wrong_sum()
    try:
        check_ranks(plan, args)
        refusal = ""
    except UserError as error:
        refusal = str(error)
    if rank == 0:
        print(json.dumps([min(seconds), warnings, refusal]))
    torch.distributed.destroy_process_group()
