"""Two ranks, as on two nodes with a disk each, choose the checkpoint of a name; each says what it has got.

torchrun --nproc_per_node 2 tests/faults/choosing.py NAME FOLDER_OF_RANK_0 FOLDER_OF_RANK_1
"""

import os
import sys
from pathlib import Path

from transformers import TrainingArguments

from indictune.checkpoint import resume
from indictune.errors import UserError

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    folder = sys.argv[2 + rank]
    args = TrainingArguments(output_dir=folder, use_cpu=True, save_on_each_node=True)
    assert args.world_size == 2
    named = Path(folder, sys.argv[1])
    try:
        told = f"takes {resume.newest_whole([named], str(named), args, False)[0]}"
    except UserError as error:
        told = error.message
    Path(folder, "told").write_text(told)
