"""When each axis pays on GPUs: the tables of `docs/strategies.md`, and one for each machine and job.

    python -m benchmarks.axes_worth

`benchmarks/axes_estimates.py` has the assumptions.
"""

from __future__ import annotations

from benchmarks import axes_formulas as formulas
from benchmarks.axes_estimates import (
    ACHIEVED,
    FP32,
    HALF,
    MACHINES,
    SUMS,
    Estimate,
    Job,
    Machine,
    estimate,
    jobs,
    layouts,
)
from benchmarks.axes_formulas import Shape, Sizes
from indictune.console_text import table


def estimates(job: Job, machine: Machine) -> dict[str, Estimate]:
    """Of all strategies but those that would have less than a row for some processes."""
    possible = {name: sizes for name, sizes in layouts(machine).items() if job.rows % sizes.data == 0}
    return {name: estimate(job, sizes, machine) for name, sizes in possible.items()}


def lines(job: Job, machine: Machine) -> list[list[str]]:
    """The table of a job, fastest first; strategies that need more memory than a GPU has come last."""
    found = estimates(job, machine)
    order = sorted(found, key=lambda name: (not found[name].fits, found[name].step_s))
    return [[name, *_cells(found[name])] for name in order]


def _cells(each: Estimate) -> list[str]:
    memory = f"{each.memory_gb:,.0f}{'' if each.fits else ' (too much)'}"
    times = (each.compute_s, each.data_s, each.tensor_s, each.context_s + each.stages_s)
    return [memory, *(f"{time:.3f}" for time in times), f"{each.bubble:.0%}", f"{each.step_s:.3f}"]


WIDTHS = (("bert", 768), ("llama", 4096), ("llama", 8192))


def hidden_from(machine: Machine) -> tuple[float, float]:
    """Tokens from which communication takes no longer than the compute that can hide it.

    DDP sums 4 bytes of each parameter in a backward pass of 4 FLOP for each parameter and token: tokens of a GPU and
    step. FSDP2 gathers 2 bytes twice for a micro-batch of 6 FLOP: tokens of a micro-batch.
    """
    gpus, flops = machine.gpus, ACHIEVED * machine.flops
    link = machine.link(gpus)
    return formulas.summed(FP32, gpus) / link * flops / 4, 2 * formulas.gathered(HALF, gpus) / link * flops / 6


def sums_of_compute(kind: str, hidden: int, parts: int, machine: Machine) -> float:
    """Time of the tensor axis' sums as a share of the compute; the number of tokens does not change it.

    A layer has 12 x hidden^2 parameters (Narayanan et al. 2021, appendix), with 6 FLOP for each and each token.
    """
    layer = Shape(1, hidden, hidden, 12 * hidden**2, 0, 0)
    sums = formulas.layer_sums(layer, Sizes(tensor=parts), 1, HALF, SUMS[kind]) / machine.link(parts)
    return sums / (6 * layer.in_layers / parts / (ACHIEVED * machine.flops))


def rules(machines: tuple[Machine, ...]) -> list[list[str]]:
    """A line for each machine: what hides DDP and FSDP2, and what 8 tensor parts cost by width."""
    return [
        [
            machine.name,
            *(f"{tokens:,.0f}" for tokens in hidden_from(machine)),
            *(f"{sums_of_compute(kind, hidden, 8, machine):.0%}" for kind, hidden in WIDTHS),
        ]
        for machine in machines
    ]


def summary(job: Job, machines: tuple[Machine, ...]) -> list[list[str]]:
    """A line for each strategy: seconds of a step on each machine, or why there are none."""
    found = [estimates(job, machine) for machine in machines]
    return [[name, *(_seconds(each.get(name)) for each in found)] for name in layouts(machines[-1])]


def _seconds(each: Estimate | None) -> str:
    if each is None:
        return "-"
    return f"{each.step_s:.3g}" if each.fits else f"{each.memory_gb:,.0f} GB"


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table for `docs/strategies.md`."""
    rule = "|---" * len(header) + "|"
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in body)])


def tables() -> list[str]:
    """Those of `docs/strategies.md`."""
    widths = [f"tensor 8, hidden {hidden:,}" for _, hidden in WIDTHS]
    header = ["GPUs", "DDP hides from tokens a GPU", "FSDP2 from tokens a micro-batch", *widths]
    by_job = [markdown([job.name, *(each.short for each in MACHINES)], summary(job, MACHINES)) for job in jobs()]
    return [markdown(header, rules(MACHINES)), *by_job]


def main() -> None:
    """Print the tables of the document, and one for each machine and job."""
    print("\n\n".join(tables()), end="\n\n")
    header = ["strategy", "GB of a GPU", "compute s", "data s", "tensor s", "keys, stages s", "bubble", "step s"]
    for machine in MACHINES:
        for job in jobs():
            print(f"{machine.name}: {job.name}\n{table(header, lines(job, machine))}\n")


if __name__ == "__main__":
    main()
