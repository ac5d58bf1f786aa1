"""All tasks, and the one that made a saved model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from indictune.tasks.chat import CausalText, Chat
from indictune.tasks.classification import Classification
from indictune.tasks.kto import RatedAnswers
from indictune.tasks.preferences import Preference
from indictune.tasks.protocol import Task
from indictune.tasks.raw_text import MaskedText
from indictune.tasks.reward import RewardModel
from indictune.tasks.tokens import TokenClassification

TASKS: tuple[Task[Any, Any, Any], ...] = (
    *(Classification(), TokenClassification(), Chat(), MaskedText(), CausalText()),
    *(Preference(), RatedAnswers(), RewardModel()),
)


def task_of(config: Mapping[str, Any], named: str | None = None) -> Task[Any, Any, Any]:
    """The task of a saved model, from the content of its `config.json`. An unknown one is read as a classifier.

    If models of several tasks have such a content, it is the one that is `named`, or the first.
    """
    fitting = [task for task in TASKS if task.can_evaluate(config)]
    return next((task for task in fitting if task.name == named), (fitting or TASKS)[0])
