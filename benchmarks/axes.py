"""Bytes sent and kept by each process, and its idle time, next to the formulas: each strategy, on this CPU.

    python -m benchmarks.axes [strategies]

Runs train a small BERT in fp32 on rows of one length, so that each step sends as much as the others; for the context
axis a small LLaMA, whose rows are longer. The kernel counts bytes that are sent. Those kept are of parameters,
gradients and states at the optimizer's last step.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks.communication import Count, count_bytes, expected_bytes, in_types
from benchmarks.environment import environment, write_results
from indictune.config.arguments import ModelArguments
from indictune.config.plan import Axes, Launch
from indictune.console_text import table
from indictune.distributed.pipeline.layout import bubble
from indictune.models.builtin import resolve
from indictune.models.config_shapes import meta_model
from indictune.planning.machine_failures import PARTS
from indictune.planning.rank_bytes import Kept, Types, data_shards, gradients_between, kept_bytes
from indictune.planning.rank_weights import LayerWidths, ModelWeights, Weight
from indictune.planning.step_time import SUMS, bytes_summed, keys_passed, layer_sums, passed_on

ROWS, TOKENS, TOKENS_OF_CHAT = 16, 32, 512  # of a step, and of a row
MICRO_BATCHES = 4
TEXT = "यह बहुत अच्छा है और मुझे पसंद आया " * 8  # more than 32 tokens
LLAMA = ("--model_name_or_path", "builtin:tiny-indic-llama", "--max_length", str(TOKENS_OF_CHAT))
FP32 = ("float32", "float32")


@dataclass(frozen=True)
class Case:
    """A strategy on some processes.

    Attributes:
        strategy: a file in `accelerate_configs/`.
        launch: of the strategy that splits the batch the same way without other axes, with these axes.
    """

    strategy: str
    launch: Launch

    @property
    def is_chat(self) -> bool:
        """Whether a LLaMA is trained: classifiers have no context axis."""
        return self.launch.axes.context > 1

    @property
    def has_master_copies(self) -> bool:
        """Whether DeepSpeed updates copies of the weights."""
        return self.launch.strategy.startswith("zero")

    @property
    def shows_gradients(self) -> bool:
        """Whether gradients can be counted between micro-batches: DeepSpeed hides them, and stages have none then."""
        return not self.has_master_copies and self.launch.axes.pipeline == 1

    @property
    def launcher_options(self) -> tuple[str, ...]:
        """Of HSDP, for which one machine stands for several nodes, and of stages in shards."""
        replicas, stages = self.launch.axes.replicas, self.launch.axes.pipeline
        if stages > 1 and self.launch.axes.is_sharded:
            return ("--megatron_lm_pp_degree", str(stages), "--megatron_lm_use_custom_fsdp", "true")
        return ("--parallelism_config_dp_replicate_size", str(replicas)) if replicas > 1 else ()

    def sent_bytes(self, count: Count) -> float:
        """Bytes that the first rank should send in a step, over gloo."""
        launch, axes, own = self.launch, self.launch.axes, self._of_rank(count)
        tokens = ROWS * (TOKENS_OF_CHAT if self.is_chat else TOKENS) // MICRO_BATCHES // launch.data_size
        shape = LayerWidths(count.layers, count.hidden, 4 * count.hidden, 1, count.key_values, is_gated=False)
        ranks = data_shards(launch) if axes.is_sharded else launch.data_size
        of_data = expected_bytes(launch.strategy, own, *FP32, accumulation_steps=MICRO_BATCHES, ranks=ranks)
        of_copies = bytes_summed(4 * own.elements / ranks, axes.replicas)
        messages = passed_on(shape, axes, tokens, value_bytes=4) / 2  # the first stage sends no gradients
        sums = layer_sums(shape, axes, tokens, value_bytes=4, sums=SUMS)
        keys = keys_passed(shape, axes, tokens, value_bytes=4, recomputes=True, gpu=False)
        return of_data + of_copies + MICRO_BATCHES * (messages + sums + keys)

    def kept_bytes(self) -> Kept:
        """Bytes that the first rank should keep at the optimizer's step, as `indictune.planning` says."""
        return kept_bytes(*self._planned(), at_step=True)

    def gradients_between(self) -> float:
        """Bytes of gradients that the first rank should keep between micro-batches."""
        return gradients_between(*self._planned())

    def _planned(self) -> tuple[list[Weight], Launch, Types]:
        fp32 = Types(trained=4, frozen=4, gradient=4, state=8, computed=4, summed=4)
        model, head = ("llama", "ForCausalLM") if self.is_chat else ("bert", "ForSequenceClassification")
        config = AutoConfig.from_pretrained(resolve(f"builtin:tiny-indic-{model}"), num_labels=2)
        weights = ModelWeights(meta_model(ModelArguments(), config, head))
        return weights.of_stages(self.launch.axes)[0], self.launch, fp32

    def _of_rank(self, count: Count) -> Count:
        """The parameters that the tensor axis leaves to a rank. A model of DeepSpeed's AutoTP has its parts alone."""
        if self.has_master_copies:
            return count
        elsewhere = round(count.elements_split * (1 - 1 / self.launch.axes.tensor))
        elements, in_units = count.elements - elsewhere, count.elements_in_units - elsewhere
        return replace(count, elements=elements, elements_in_units=in_units)


def on(processes: int, engine: str = "ddp", **axes: int) -> Launch:
    """A launch on a CPU, which has no other memory to offload to."""
    return Launch(engine, processes, processes, axes=Axes(**axes, is_sharded=engine == "fsdp2"))


CASES = (
    Case("ddp", on(4)),
    Case("fsdp2", on(4, "fsdp2")),
    Case("zero1", on(4, "zero1")),
    Case("zero2", on(4, "zero2")),
    Case("zero3", on(4, "zero3")),
    Case("pipeline", on(2, pipeline=2)),
    Case("tp", on(2, tensor=2)),
    Case("ddp_tp", on(4, tensor=2)),
    Case("fsdp2_tp", on(4, "fsdp2", tensor=2)),
    Case("hsdp", on(4, "fsdp2", replicas=2)),
    Case("zero1_tp", on(4, "zero1", tensor=2)),
    Case("zero2_tp", on(4, "zero2", tensor=2)),
    Case("fsdp2_cp", on(2, "fsdp2", context=2)),
    Case("3d", on(8, pipeline=2, tensor=2)),
)


def write_rows(folder: Path, is_chat: bool) -> Path:
    """Rows of one length, in tokens."""
    path = folder / "rows.jsonl"
    rows = [{"text": TEXT, "label": ("negative", "positive")[number % 2]} for number in range(160)]
    if is_chat:
        rows = [{"prompt": "?", "completion": TEXT * 16}] * 160
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def measure(case: Case, anew: bool = True) -> dict[str, Any]:
    """Train under a strategy; what the first rank sends and keeps, and what it should. `anew` is that of `start`."""
    rows = ROWS // MICRO_BATCHES // case.launch.data_size
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = (*in_types(*FP32), "--per_device_train_batch_size", str(rows), "--logging_steps", "1")
        flags += LLAMA if case.is_chat else ("--active_vocabulary", "off")
        files = ("--train_file", str(write_rows(folder, case.is_chat)), "--validation_split", "0")
        counts = count_bytes(
            case.strategy,
            folder,
            *flags,
            ranks=case.launch.world_size,
            rows=files,
            options=case.launcher_options,
            task="llama" if case.is_chat else "sentiment",
            anew=anew,
        )
        count = counts[0]
        idle = _idle_share(folder / "run")
    return {
        "strategy": case.strategy,
        "ranks": case.launch.world_size,
        "bytes_a_step": count.sent,
        "formula_bytes": case.sent_bytes(count),
        "kept_bytes": count.kept,
        "between_bytes": count.between if case.shows_gradients else None,
        "formula_between_bytes": case.gradients_between(),
        "formula_kept_bytes": {name: vars(case.kept_bytes())[name] for name in PARTS},
        "idle_share": idle,
        "formula_idle_share": bubble(case.launch.axes.pipeline, MICRO_BATCHES),
    }


def _idle_share(run: Path) -> float:
    """Median share of a step in which ranks of a pipeline waited; 0 without one. The first step counts connections."""
    lines = (run / "train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return float(statistics.median(json.loads(line).get("bubble", 0.0) for line in lines[1:]))


def _line(found: dict[str, Any]) -> list[str]:
    """A line of the table, in MB."""
    sent = [f"{found[name] / 1e6:.2f}" for name in ("bytes_a_step", "formula_bytes")]
    kept, formula = found["kept_bytes"], found["formula_kept_bytes"]
    pairs = [f"{kept[name] / 1e6:.2f} / {formula[name] / 1e6:.2f}" for name in PARTS]
    idle = f"{found['idle_share']:.0%} / {found['formula_idle_share']:.0%}"
    return [found["strategy"], str(found["ranks"]), *sent, *pairs, idle]


def main() -> None:
    """Measure the strategies that are named, or all; print the table and write the result file, which names them."""
    about, asked = environment(), sys.argv[1:]
    found = [measure(case) for case in CASES if not asked or case.strategy in asked]
    header = ["strategy", "ranks", "MB a step", "formula", *(f"{name} / formula" for name in PARTS), "idle / formula"]
    print(table(header, [_line(each) for each in found]), end="\n\n")
    path = write_results("-".join(["axes", *asked]), {"environment": about, "strategies": found})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
