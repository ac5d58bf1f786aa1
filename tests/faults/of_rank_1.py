"""A script whose second rank gets more flags: `of_rank_1.py FLAGS SCRIPT FLAGS...`, the first in one word."""

from __future__ import annotations

import os
import runpy
import shlex
import sys

more, script = sys.argv[1], sys.argv[2]
sys.argv = [*sys.argv[2:], *(shlex.split(more) if os.environ["RANK"] == "1" else [])]
sys.path[0] = os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
