"""Whether this machine has what the launch asks for: GPUs, number types, restarts."""

from __future__ import annotations

from indictune.config.plan import AnyPlan
from indictune.distributed import elastic
from indictune.errors import Problem, problem


def check_processes(plan: AnyPlan) -> list[Problem]:
    """Refuse several processes a GPU, and restarts over several nodes."""
    found, launch = [], plan.launch
    if 0 < plan.gpus < launch.local_world_size:  # without a GPU, any number of processes runs on the CPU
        found.append(problem("more-processes-than-gpus", "--num_processes", launch.local_world_size, gpus=plan.gpus))
    restarts = elastic.limit(plan.environ)
    if restarts and launch.local_world_size != launch.world_size:
        found.append(problem("restarts-over-nodes", "--max-restarts", restarts))
    return found


def check_number_type(plan: AnyPlan) -> list[Problem]:
    """Refuse fp16 without a GPU: accelerate (1.15) would train in fp32 without a warning."""
    return [problem("fp16-without-gpu", "--fp16", "true")] if plan.training.fp16 and not plan.gpus else []


def check_launcher_settings(plan: AnyPlan) -> list[Problem]:
    """Refuse fp8, which no flag can give: `recipe.yaml` would not record it."""
    asked = plan.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    instead = "--bf16 true or --fp16 true"
    return [problem("launcher-sets", "--mixed_precision", asked, instead=instead)] if asked == "fp8" else []
