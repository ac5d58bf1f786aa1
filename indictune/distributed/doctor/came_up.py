"""What the launcher and its file asked for against what came up."""

from __future__ import annotations

from torch import distributed
from transformers import TrainingArguments

from indictune.config.plan import Launch
from indictune.distributed.doctor.lines import Line

CHECK = "launch"


def launch_line(launch: Launch, args: TrainingArguments) -> Line:
    """The strategy, its axes, processes and backend. `launch_check` has compared strategy and processes."""
    nodes = max(1, launch.world_size // launch.local_world_size)
    sizes = {"pipeline": launch.axes.pipeline, "tensor": launch.axes.tensor, "context": launch.axes.context}
    sizes |= {"data": launch.data_size, "replicas": launch.axes.replicas}
    axes = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    asked = f"{launch.strategy}, {launch.world_size} process(es) on {nodes} node(s)" + (f", {axes}" if axes else "")
    if not distributed.is_initialized():
        return Line(CHECK, "ok", f"{asked}, on {args.device}")
    rank, backend = distributed.get_rank(), distributed.get_backend()
    expected = "nccl" if args.device.type == "cuda" else "gloo"
    if rank != launch.rank:
        cure = "Start all processes with one launcher command."
        return Line(CHECK, "fail", f"{asked}; rank {launch.rank} came up as {rank}", cure)
    if expected not in backend:
        cure = f"Leave out --ddp_backend: {expected} is the backend of {args.device.type}."
        return Line(CHECK, "warn", f"{asked}, on {args.device} over {backend}", cure)
    return Line(CHECK, "ok", f"{asked}, over {backend}")
