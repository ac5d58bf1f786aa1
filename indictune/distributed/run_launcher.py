"""Run `accelerate launch` without its traceback when a rank fails: the rank has said why.

python -m indictune.distributed.run_launcher --config_file F --num_processes N SCRIPT [flags]
"""

from __future__ import annotations

import logging
import subprocess
import sys

from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> int:
    """Launch what the command line says; returns 1 if a rank failed."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args())
    except (ChildFailedError, subprocess.CalledProcessError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
