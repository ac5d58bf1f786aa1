"""Two ranks, as on two nodes with a disk each, choose a named checkpoint; each writes what it has chosen.

torchrun --nproc_per_node 2 tests/faults/choosing.py NAME FOLDER_OF_RANK_0 FOLDER_OF_RANK_1
"""

import os
import sys
from pathlib import Path

from transformers import TrainingArguments

from indictune.checkpoint.resume import AllRanksReader, choose_resume_point
from indictune.distributed.collectives import group_of_disks
from indictune.errors import UserError

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    folder = sys.argv[2 + rank]
    args = TrainingArguments(output_dir=folder, use_cpu=True, save_on_each_node=True)
    assert args.world_size == 2
    named = Path(folder, sys.argv[1])
    try:
        reader = AllRanksReader(args, False, group_of_disks(args))
        outcome = f"takes {choose_resume_point(Path(folder), str(named), reader).checkpoint}"
    except UserError as error:
        outcome = error.message
    Path(folder, "outcome").write_text(outcome)
