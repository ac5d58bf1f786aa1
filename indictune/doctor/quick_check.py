"""The quick half of the examination, which a run of several ranks does by itself before it loads a model.

What a run compares anyway is left out: flags, rows, packages and the strategy (`training/rank_consistency.py`,
`launch_check.py`), GPUs and processes (`preflight/processes.py`).
"""

from __future__ import annotations

from transformers import TrainingArguments

from indictune.config.plan import AnyPlan
from indictune.distributed import agreement
from indictune.distributed.collectives import gather_from_all
from indictune.doctor import collective_checks
from indictune.doctor.check_lines import merged
from indictune.doctor.compare_ranks import clock_lines, clock_readings
from indictune.doctor.machine import package_lines, shared_memory_line
from indictune.doctor.run_files import disk_line
from indictune.errors import UserError, problem

_NUMBERS = 1 << 16  # float32 numbers of a rank


def check_ranks(plan: AnyPlan, args: TrainingArguments) -> list[str]:
    """What the user is warned of; nothing for one process. All ranks must call it, and all get the same.

    Args:
        plan: of the run. Its folder exists.
        args: of this rank, once the process group is up.

    Raises:
        UserError: a collective gives a wrong result.
    """
    if args.world_size == 1:
        return []
    base = collective_checks.known_numbers(_NUMBERS, args.device)
    right = {each.name: collective_checks.is_right(each, base) for each in collective_checks.COLLECTIVES}
    own = [
        *package_lines(plan.environ, plan.gpus, args.world_size),
        shared_memory_line(),
        disk_line(plan, timed=False),
    ]
    everyone = gather_from_all((agreement.host(), own, right, clock_readings()))
    hosts = [each[0] for each in everyone]
    by_name = {name: [each[2][name] for each in everyone] for name in right}
    if wrong := collective_checks.wrong_lines(by_name, hosts):
        raise UserError(problems=[problem("collective-wrong", each.check, each.found) for each in wrong])
    found = merged([each[1] for each in everyone], hosts)
    found += clock_lines([each[3] for each in everyone], hosts)
    return [f"{line.check}: {line.found}. {line.cure}" for line in found if line.status != "ok"]
