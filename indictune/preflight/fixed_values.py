"""Settings of transformers' Trainer that must keep their value: exact batches, loss and evaluation need it."""

from __future__ import annotations

from indictune.config.plan import AnyPlan
from indictune.errors import Problem, problem

FIXED = {
    "average_tokens_across_devices": (True, "the loss is exact over all processes"),
    "dataloader_drop_last": (False, "every row is used once an epoch"),
    "dataloader_persistent_workers": (False, "the order of an epoch must not depend on where a run stopped"),
    "auto_find_batch_size": (False, "--global_batch_size fixes the batch"),
    "train_sampling_strategy": ("random", "the rows of a global batch are the same under every strategy"),
    "logging_nan_inf_filter": (False, "a NaN loss stops the run"),
    "prediction_loss_only": (False, "evaluations need the predictions"),
    "batch_eval_metrics": (False, "metrics are computed once, over all rows"),
    "eval_do_concat_batches": (True, "metrics are computed over all rows"),
    "eval_use_gather_object": (False, "results of rows are gathered as tensors"),
    "neftune_noise_alpha": (None, "its noise depends on how a global batch is cut"),
    "ignore_data_skip": (False, "a resumed run continues after its last row"),
    "restore_callback_states_from_checkpoint": (True, "a resumed run keeps the count of early stopping"),
    "save_only_model": (False, "a checkpoint holds everything that a resume needs"),
    "save_on_each_node": (False, "the run finds out whether nodes share a disk"),
    "eval_on_start": (False, "a resumed run would evaluate once more"),
    "enable_jit_checkpoint": (False, "a signal saves a checkpoint anyway"),
    "accelerator_config": (None, "accelerate does not deal the rows here"),
}


def check_fixed_values(plan: AnyPlan) -> list[Problem]:
    """Refuse settings of the Trainer that would break what a run promises."""
    given = {name: getattr(plan.training, name) for name in FIXED}
    return [
        problem("setting-is-fixed", f"--{name}", given[name], fixed=value, reason=reason)
        for name, (value, reason) in FIXED.items()
        if given[name] != value
    ]
