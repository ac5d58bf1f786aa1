"""All tasks, and the one that made a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification

TASKS: tuple[Task[Any, Any, Any], ...] = (Classification(), TokenClassification(), Chat())


def task_of(config: Mapping[str, Any]) -> Task[Any, Any, Any]:
    """The task of a saved model, from the content of its `config.json`. An unknown one is read as a classifier."""
    return next((task for task in TASKS if task.can_evaluate(config)), TASKS[0])
