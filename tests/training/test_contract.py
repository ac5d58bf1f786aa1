"""The trainers override few methods of transformers' Trainer, and what they rely on there holds."""

from __future__ import annotations

import inspect

import pytest
from transformers import Trainer

from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.exact_trainer import ExactTrainer, IndicTrainer
from indictune.training.task_trainer import TaskTrainer

# Parameters upstream, without `self`, of each method that is overridden.
OVERRIDDEN = {
    "get_tp_size": [],
    "get_train_dataloader": [],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "save_model": ["output_dir", "_internal_call"],
    "init_hf_repo": ["token", "private"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_save_checkpoint": ["model", "trial"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
}

# In the order in which they stand upstream: what an override, or a callback in place of one, relies on.
ORDER = {
    "_inner_training_loop": ["_init_training_state(", "_prepare_for_training(", "on_train_begin(", "on_epoch_begin("],
    "_run_epoch": [
        "self._load_rng_state(",
        "iter(train_dataloader)",
        "self.get_batch_samples(",
        "on_step_begin(",
        "self.training_step(",
        "self._get_grad_norm(",
        "self.optimizer.step()",
        "on_step_end(",
        "self._maybe_log_save_evaluate(",
    ],
    "_maybe_log_save_evaluate": [
        "tr_loss -= tr_loss",
        "self.log(logs",
        "self._evaluate(",
        "self._determine_best_metric(",
        "self._save_checkpoint(",
    ],
    "_prepare_for_training": ["self.create_scheduler(", "if resume_from_checkpoint is not None", "self._load_scaler("],
    "_finalize_training": ["self.state.best_model_checkpoint is not None", "self._load_best_model()", "on_train_end("],
}


def overridden() -> list[tuple[type, str]]:
    classes = (TaskTrainer, ExactTrainer, IndicTrainer, LlamaTrainer)
    return [
        (each, name)
        for each in classes
        for name in vars(each)
        if not name.startswith("__") and callable(getattr(Trainer, name, None))
    ]


def test_few_methods_are_overridden_each_with_its_reason() -> None:
    found = overridden()
    assert {name for _, name in found} == set(OVERRIDDEN)
    assert len(found) <= 12
    assert len([name for _, name in found if name.startswith("_")]) <= 4
    assert [name for each, name in found if not inspect.getdoc(vars(each)[name])] == []


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_upstream_has_the_parameters_that_an_override_takes(name: str) -> None:
    assert list(inspect.signature(getattr(Trainer, name)).parameters)[1:] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", ORDER)
def test_upstream_calls_in_the_order_that_is_relied_on(name: str) -> None:
    source = inspect.getsource(getattr(Trainer, name))
    places = [source.index(part) for part in ORDER[name]]
    assert places == sorted(places)
