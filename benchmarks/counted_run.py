"""Run task $TASK (`sentiment`, `llama`, `dpo`) on one rank, and count the bytes that each step sends and keeps.

`benchmarks/communication.py`, `benchmarks/axes.py` and `benchmarks/plan.py` start it. It writes
`$COUNTS/rank-<r>.json`. `$AS_TRAINER` keeps the Trainer's settings, and `$PEAK` measures the peak of memory.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import indictune.before_imports  # noqa: F401, as the script does
from indictune.config.recipe import read_recipe
from indictune.distributed.parallelism import Parallelism
from indictune.distributed.sharding import full_shapes
from indictune.planning.machine_failures import PARTS, held_bytes
from indictune.planning.rank_weights import layer_widths
from indictune.supervise.execute import execute
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.preferences import Preference
from indictune.tasks.protocol import Task
from indictune.training import run_task


class Peak:
    """The most memory that training has at once: of the GPU's allocator, or on a CPU the model's weights and what
    torch's allocator gives out beside them."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = sum(each.nbytes for each in {*model.parameters(), *model.buffers()})
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        if not torch.cuda.is_available():
            self._profile.start()

    def bytes(self) -> int:
        """Until now. It ends the counting."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated()
        self._profile.stop()
        results: Any = self._profile.profiler
        events = [each for each in results.kineto_results.events() if each.name() == "[memory]"]
        given = accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns()))
        return self._weights + max(given, default=0)


class CountBytes(TrainerCallback):
    """Records the bytes written after each step, and those kept before and inside the last one; writes all at the end.

    `between` are those of gradients after the last micro-batch but one.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.kept: dict[str, int] = {}
        self.between = 0
        self._counted: dict[int, torch.Tensor] = {}  # in this step
        self._peak: Peak | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        def note(optimizer: Optimizer, *_: Any) -> None:
            if not self._counted:
                self.kept = dict.fromkeys(PARTS, 0)
            found = held_bytes(others["model"], optimizer, self._counted)
            self.kept = {name: total + found[name] for name, total in self.kept.items()}

        register_optimizer_step_pre_hook(note)
        self._peak = Peak(others["model"]) if os.environ.get("PEAK") else None

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        self.between = held_bytes(others["model"])["gradients"]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.bytes.append(written_bytes())
        self._counted.clear()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        config = others["model"].config
        noted: dict[str, Any] = {"bytes": self.bytes, "kept": self.kept, "between": self.between}
        noted["parameters"] = parameters(others["model"])
        widths = layer_widths(config)
        sizes = {"layers": widths.layers, "hidden": widths.hidden, "key_values": widths.key_values}
        noted["peak"] = None if self._peak is None else self._peak.bytes()
        path = Path(os.environ["COUNTS"]) / f"rank-{args.process_index}.json"
        path.write_text(json.dumps(noted | sizes), encoding="utf-8")


def written_bytes() -> int:
    """Bytes that this process has written, mostly to sockets (Linux)."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def parameters(model: nn.Module) -> list[dict[str, Any]]:
    """`name` and whole `shape` of trained parameters, and whether they are `in_a_unit` that is gathered twice.

    FSDP2 (torch 2.13) does not free the root between the passes, nor a LLaMA's head, which accelerate wraps.
    """
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    groups = [each for unit in units for each in unit._get_fsdp_state()._fsdp_param_groups]
    inside = {id(each.sharded_param) for group in groups if group._reshard_after_forward for each in group.fsdp_params}
    sizes = full_shapes(model)
    return [
        {"name": name, "shape": sizes[name], "in_a_unit": id(parameter) in inside}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def main() -> int:
    """Run the task with the callback `CountBytes`."""
    of_name: dict[str, Task[Any, Any, Any]] = {"llama": Chat(), "dpo": Preference()}
    task = of_name.get(os.environ.get("TASK", ""), Classification())
    train = vars(run_task)["train_model"]

    def count_and_train(trainer: Any, *args: Any) -> Any:
        trainer.add_callback(CountBytes())
        return train(trainer, *args)

    if os.environ.get("AS_TRAINER"):
        setattr(Parallelism, "set_up", lambda *_: None)  # noqa: B010
    setattr(run_task, "train_model", count_and_train)  # noqa: B010
    return execute(partial(run_task.run_task, task), read_recipe(sys.argv[1:], task.arguments))


if __name__ == "__main__":
    sys.exit(main())
