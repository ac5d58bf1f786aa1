"""Loss curves of one recipe under ten strategies, by `indictune parity`: they lie on one another.

    python -m benchmarks.strategies [--steps 120]

The recipe is the demo, in fp32 without dropout. One process is compared with two, or with four where two axes are
split. The program writes a result file and the picture `docs/images/strategies.png`.
"""

from __future__ import annotations

import argparse
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from benchmarks.environment import environment, write_results
from indictune.commands.parity import run_parity
from indictune.config.command_line import read_flags

RECIPE = "recipes/sentiment/demo.yaml"
PICTURE = Path(__file__).parents[1] / "docs/images/strategies.png"
STRATEGIES = (
    *("ddp", "fsdp2", "fsdp2_offload", "tp", "fsdp2_tp", "pipeline"),
    *("zero1", "zero2", "zero3", "zero3_offload"),
)


def main() -> None:
    """Compare the strategies, write the result file and the picture, and exit with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    steps = str(parser.parse_args().steps)
    about, said = environment(), StringIO()
    flags = ("--strategies", ",".join(STRATEGIES), "--steps", steps, "--json", "--plot", str(PICTURE))
    with redirect_stdout(said):
        code = run_parity(read_flags([RECIPE, *flags]))
    results = {"environment": about, "recipe": RECIPE, **json.loads(said.getvalue())}
    print(f"written to {write_results('strategies', results)}")
    print(f"drawn in {PICTURE}")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
