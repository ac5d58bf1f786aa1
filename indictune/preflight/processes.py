"""Whether this machine has what the launch asks for: GPUs and number types."""

from __future__ import annotations

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem


def check_processes(plan: AnyPlan) -> list[Problem]:
    """Refuse several processes a GPU."""
    processes = plan.launch.local_world_size
    if not 0 < plan.gpus < processes:  # without a GPU, any number of processes runs on the CPU
        return []
    return [problem("more-processes-than-gpus", "--num_processes", processes, gpus=plan.gpus)]


def check_number_type(plan: AnyPlan) -> list[Problem]:
    """Refuse fp16 without a GPU: accelerate (1.15) would train in fp32 without a warning."""
    return [problem("fp16-without-gpu", "--fp16", "true")] if plan.training.fp16 and not plan.gpus else []


def check_launcher_settings(plan: AnyPlan) -> list[Problem]:
    """Refuse fp8, which no flag can give: `recipe.yaml` would not record it."""
    asked = plan.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    instead = "--bf16 true or --fp16 true"
    return [problem("launcher-sets", "--mixed_precision", asked, instead=instead)] if asked == "fp8" else []
