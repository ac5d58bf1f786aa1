"""Label the parts of input files on a Ray cluster: Ray Data hands them to actors, each with the model."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray

from indictune.config.shared_arguments import TextFileArguments
from indictune.data.bad_rows import BadRows
from indictune.errors import Problems, UserError
from indictune.prediction.input_parts import InputFiles
from indictune.prediction.labelled_parts import LabelledParts, counted_progress, labelled_one_by_one
from indictune.prediction.labelled_rows import label, opened_model
from indictune.prediction.served_classifier import Classifier
from indictune.ray_cluster import processors

Columns = Mapping[str, np.ndarray]


class Labelling:
    """An actor that reads the model once, and then labels and keeps parts."""

    def __init__(self, asked: TextFileArguments, source: InputFiles, labelled: LabelledParts) -> None:
        self._asked, self._source, self._labelled = asked, source, labelled
        served, _ = opened_model(asked.model, asked)
        self._make = partial(label, Classifier(served, asked.max_tokens_per_device))

    def __call__(self, rows: Columns) -> Columns:
        """Label the parts of some rows; a `UserError` comes back as its problems, because Ray would wrap it."""
        parts, problems = list(map(pickle.loads, rows["part"])), b""
        try:
            for _ in labelled_one_by_one(parts, self._source, self._labelled, self._make, self._asked):
                pass
        except UserError as error:
            problems = pickle.dumps(list(error.problems))
        is_failed = [part in self._labelled.failed for part in parts]
        return {**rows, "is_failed": np.array(is_failed), "problems": np.array([problems] * len(parts), object)}


def label_on_ray(source: InputFiles, labelled: LabelledParts, asked: TextFileArguments) -> None:
    """Label all parts on the cluster that this process has joined, with an actor for each GPU, or each core.

    A part whose actor or node is lost is labelled by another one. All nodes must find the model by its path.
    """
    labelled.open(lambda: source.parts)
    left = [part for part in labelled.parts if part.number not in labelled.done]
    kind, counts = processors("--engine", 0)
    actors = max(1, min(len(left), sum(counts)))
    print(f"Ray: {actors} actors on {len(counts)} nodes label {len(left)} parts", file=sys.stderr)
    context = ray.data.DataContext.get_current()  # which configures the logger
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context.enable_progress_bars = context.execution_options.preserve_order = False
    of_actor = copy(labelled)
    of_actor.parts, of_actor.done = [], set()
    read = replace(source, versions={}, counted=(), bad=BadRows(source.file.path, source.bad.skips_damage))
    if left:
        rows = [{"number": part.number, "part": pickle.dumps(part)} for part in left]
        made = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Labelling,
            fn_constructor_args=(asked, read, of_actor),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
            num_cpus=int(kind == "CPU"),
            num_gpus=int(kind == "GPU"),
        )
        with counted_progress(labelled, 0) as look:
            for row in made.iter_rows():
                _take(labelled, row)
                look()
    labelled.finish()
    print(f"Written to {labelled.output}", file=sys.stderr)


def _take(labelled: LabelledParts, row: Mapping[str, Any]) -> None:
    """Note what became of a part, or raise what its actor has raised."""
    if row["problems"]:
        raise UserError(problems=Problems(pickle.loads(row["problems"])))
    if row["is_failed"]:
        labelled.failed.append(labelled.parts[row["number"]])
    else:
        labelled.done.add(row["number"])
