"""Whether the model can be trained as asked, by its configuration alone."""

from __future__ import annotations

from indictune.config.plan import AnyPlan
from indictune.distributed.strategy_limits import check_weights
from indictune.errors import Problem, problems_of
from indictune.models.adapters import check_published_base
from indictune.models.load import stored_quantisation
from indictune.models.position_limits import check_max_length


def check_model(plan: AnyPlan) -> list[Problem]:
    """Check the configuration of the model against method, strategy and length of texts. The plan has it."""
    config = plan.model_config
    assert config is not None
    return [
        *problems_of(check_max_length, config, plan.data.max_length),
        *(check_weights(plan, stored_quantisation(config)) if plan.launch.is_known else []),
        *problems_of(check_published_base, plan.model, plan.training.push_to_hub),
    ]
