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
    """Refuse fp16 without a GPU, and a number type that only the launcher names.

    accelerate (1.15) trains in fp32 on a CPU without a warning. transformers (5.23) takes the type of accelerate's
    flag or file, and neither `recipe.yaml` nor the saved model would record it.
    """
    training, found = plan.training, []
    if training.fp16 and not plan.gpus:
        found.append(problem("fp16-without-gpu", "--fp16", "true"))
    asked = plan.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    own = "fp16" if training.fp16 else "no" if training.bf16 is False else "bf16"  # None is bf16, of a LLaMA
    if asked not in ("no", own):
        instead = f"--{asked} true" if asked in ("bf16", "fp16") else "--bf16 true"
        found.append(problem("launcher-sets-number-type", "--mixed_precision", asked, own=own, instead=instead))
    return found


def check_compiler(plan: AnyPlan) -> list[Problem]:
    """Refuse a compiler that only the launcher names: `recipe.yaml` would not record it."""
    backend = plan.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").lower()
    return [] if backend == "no" else [problem("launcher-sets-compiler", "--dynamo_backend", backend)]
