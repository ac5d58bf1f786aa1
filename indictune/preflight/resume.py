"""Whether the checkpoint that a run resumes from fits it, as far as one rank can tell before the ranks meet."""

from __future__ import annotations

from indictune.checkpoint import resume
from indictune.config.plan import AnyPlan
from indictune.distributed import elastic
from indictune.errors import Problem, problems_of


def check_resume(plan: AnyPlan) -> list[Problem]:
    """Refuse a checkpoint that does not exist, is not trusted, or does not fit the plan."""
    asked = plan.training.resume_from_checkpoint
    found = problems_of(resume.check_restarts, asked, elastic.limit(plan.environ))
    return found + problems_of(_check_candidate, plan)


def _check_candidate(plan: AnyPlan) -> None:
    checkpoint = resume.candidate(plan.output_dir, plan.training.resume_from_checkpoint)
    if checkpoint is not None:
        resume.check_trusted(checkpoint, plan.output_dir, plan.model.trust_checkpoint)
        if plan.launch.is_known:
            resume.check_fits(checkpoint, plan.launch, plan.configuration, plan.model_values)
