"""Label the parts of input files on a Ray cluster: Ray Data hands them to actors, each with the model."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import ray

from indictune.config.shared_arguments import TextFileArguments
from indictune.errors import Problems, UserError
from indictune.prediction.input_parts import Part
from indictune.prediction.labelled_parts import InputFiles, LabelledParts, counted_progress, labelled_one_by_one
from indictune.prediction.labelled_rows import label, opened_model
from indictune.prediction.served_classifier import Classifier

Columns = Mapping[str, np.ndarray]


class Labelling:
    """An actor that reads the model once, and then labels and keeps parts.

    `model_files` is the content of the model's folder, for nodes that lack it.
    """

    def __init__(
        self, asked: TextFileArguments, model_files: Any, source: InputFiles, labelled: LabelledParts
    ) -> None:
        if not Path(asked.model).exists():
            asked.model = mkdtemp()
            for name, content in ray.get(model_files).items():
                path = Path(asked.model, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        self._asked, self._source, self._labelled = asked, source, labelled
        served, _ = opened_model(asked.model, asked)
        self._classifier = Classifier(served, asked.max_tokens_per_device)

    def __call__(self, rows: Columns) -> Columns:
        """Label the parts of these numbers; a `UserError` comes back as its problems, which Ray would wrap."""
        parts = [self._labelled.parts[number] for number in rows["number"].tolist()]
        problems = b""
        try:
            make = partial(label, self._classifier)
            for _ in labelled_one_by_one(parts, self._source, self._labelled, make, self._asked):
                pass
        except UserError as error:
            problems = pickle.dumps(list(error.problems))
        is_failed = [part in self._labelled.failed for part in parts]
        return {**rows, "is_failed": np.array(is_failed), "problems": np.array([problems] * len(parts), object)}


def label_on_ray(source: InputFiles, labelled: LabelledParts, asked: TextFileArguments) -> None:
    """Label all parts on the cluster that this process has joined, with an actor for each GPU, or each core but one.

    A part whose actor or node is lost is labelled by another one.
    """
    labelled.open(source.parts)
    left = [part for part in labelled.parts if part.number not in labelled.done]
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus, cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
    actors = max(1, min(len(left), gpus or cores - 1))
    print(f"Ray: {actors} actors on {len(ray.nodes())} nodes label {len(left)} parts", file=sys.stderr)
    files = {path.relative_to(asked.model): path for path in Path(asked.model).rglob("*") if path.is_file()}
    model_files = ray.put(
        {str(name): path.read_bytes() for name, path in files.items() if "checkpoint-" not in str(name)}
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    if left:
        numbers = ray.data.from_items([{"number": part.number} for part in left], override_num_blocks=len(left))
        made = numbers.map_batches(
            Labelling,
            fn_constructor_args=(asked, model_files, source, labelled),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
            num_cpus=0 if gpus else 1,
            num_gpus=1 if gpus else 0,
        )
        with counted_progress(labelled, 0) as look:
            for row in made.iter_rows():
                _take(labelled, labelled.parts[row["number"]], row)
                look()
    labelled.finish()
    print(f"Written to {labelled.output}", file=sys.stderr)


def _take(labelled: LabelledParts, part: Part, row: Mapping[str, Any]) -> None:
    """Note what became of a part, or raise what its actor has raised."""
    if row["problems"]:
        raise UserError(problems=Problems(pickle.loads(row["problems"])))
    if row["is_failed"]:
        labelled.failed.append(part)
    else:
        labelled.done.add(part.number)
