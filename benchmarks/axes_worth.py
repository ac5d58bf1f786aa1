"""When each axis pays on GPUs: the tables of `docs/axes.md`, and one for each machine and job.

    python -m benchmarks.axes_worth

The formulas and their assumptions are those of `indictune plan`: `indictune/planning/`.
"""

from __future__ import annotations

from benchmarks.axes_jobs import MACHINES, Job, estimate, jobs, layouts
from indictune.config.plan import Axes
from indictune.console_text import table
from indictune.planning import step_time
from indictune.planning.hardware import Machine, assumed
from indictune.planning.memory import Memory
from indictune.planning.rank_bytes import FP32, HALF
from indictune.planning.rank_weights import LayerWidths
from indictune.planning.step_time import SUMS, SUMS_IF_GATED, Step

Estimate = tuple[Memory, Step]


def estimates(job: Job, machine: Machine) -> dict[str, Estimate]:
    """Of all strategies but those that would have less than a row for some processes, or split a classifier's rows."""
    possible = {
        name: launch
        for name, launch in layouts(machine).items()
        if job.rows % launch.data_size == 0 and (launch.axes.context == 1 or job.plan.head == "ForCausalLM")
    }
    return {name: estimate(job, launch, machine) for name, launch in possible.items()}


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether a GPU has that much memory."""
    return memory.total_bytes <= machine.memory_bytes


def lines(job: Job, machine: Machine) -> list[list[str]]:
    """The table of a job, fastest first; strategies that need more memory than a GPU has come last."""
    found = estimates(job, machine)
    order = sorted(found, key=lambda name: (not fits(found[name][0], machine), found[name][1].seconds))
    return [[name, *_cells(*found[name], machine)] for name in order]


def _cells(memory: Memory, step: Step, machine: Machine) -> list[str]:
    size = f"{memory.total_bytes / 1e9:,.0f}{'' if fits(memory, machine) else ' (too much)'}"
    times = (step.compute_s, step.data_s, step.tensor_s, step.context_s + step.stages_s)
    return [size, *(f"{time:.3f}" for time in times), f"{step.bubble:.0%}", f"{step.seconds:.3f}"]


WIDTHS = (("bert", 768), ("llama", 4096), ("llama", 8192))


def hidden_from(machine: Machine) -> tuple[float, float]:
    """Tokens from which communication takes no longer than the compute that can hide it.

    DDP sums 4 bytes of each parameter in a backward pass of 4 FLOP for each parameter and token: tokens of a GPU and
    step. FSDP2 gathers 2 bytes twice for a micro-batch of 6 FLOP: tokens of a micro-batch.
    """
    gpus, flops = machine.gpus, assumed("achieved") * machine.flops
    link = machine.link(gpus)
    return step_time.bytes_summed(FP32, gpus) / link * flops / 4, 2 * step_time.bytes_gathered(
        HALF, gpus
    ) / link * flops / 6


def sums_of_compute(kind: str, hidden: int, parts: int, machine: Machine) -> float:
    """Time of the tensor axis' sums as a share of the compute; the number of tokens does not change it.

    A layer has 12 x hidden^2 parameters (Narayanan et al. 2021, appendix), with 6 FLOP for each and each token.
    """
    layer = LayerWidths(1, hidden, 4 * hidden, 1, hidden, kind == "llama")
    count = SUMS_IF_GATED if layer.is_gated else SUMS
    sums = step_time.layer_sums(layer, Axes(tensor=parts), 1, HALF, count) / machine.link(parts)
    return float(sums / (6 * 12 * hidden**2 / parts / (assumed("achieved") * machine.flops)))


def rules() -> list[list[str]]:
    """A line for each machine: what hides DDP and FSDP2, and what 8 tensor parts cost by width."""
    return [
        [
            name,
            *(f"{tokens:,.0f}" for tokens in hidden_from(machine)),
            *(f"{sums_of_compute(kind, hidden, 8, machine):.0%}" for kind, hidden in WIDTHS),
        ]
        for name, machine in MACHINES.values()
    ]


def summary(job: Job) -> list[list[str]]:
    """A line for each strategy: seconds of a step on each machine, or why there are none."""
    machines = [machine for _, machine in MACHINES.values()]
    found = [(estimates(job, machine), machine) for machine in machines]
    return [[name, *(_seconds(each.get(name), machine) for each, machine in found)] for name in layouts(machines[-1])]


def _seconds(each: Estimate | None, machine: Machine) -> str:
    if each is None:
        return "-"
    memory, step = each
    return f"{step.seconds:.3g}" if fits(memory, machine) else f"{memory.total_bytes / 1e9:,.0f} GB"


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table for `docs/axes.md`."""
    rule = "|---" * len(header) + "|"
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in body)])


def tables() -> list[str]:
    """Those of `docs/axes.md`."""
    widths = [f"tensor 8, hidden {hidden:,}" for _, hidden in WIDTHS]
    header = ["GPUs", "DDP hides from tokens a GPU", "FSDP2 from tokens a micro-batch", *widths]
    by_job = [markdown([job.name, *MACHINES], summary(job)) for job in jobs()]
    return [markdown(header, rules()), *by_job]


def main() -> None:
    """Print the tables of the document, and one for each machine and job."""
    print("\n\n".join(tables()), end="\n\n")
    header = ["strategy", "GB of a GPU", "compute s", "data s", "tensor s", "keys, stages s", "bubble", "step s"]
    for name, machine in MACHINES.values():
        for job in jobs():
            print(f"{name}: {job.name}\n{table(header, lines(job, machine))}\n")


if __name__ == "__main__":
    main()
