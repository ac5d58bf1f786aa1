"""Check that a run can resume from the checkpoint it was given, as far as one rank can see."""

from __future__ import annotations

from pathlib import Path

from indictune.checkpoint import compatibility
from indictune.checkpoint.resume import Reader, ResumePoint, choose_resume_point
from indictune.checkpoint.trust import check_trusted
from indictune.config.plan import AnyPlan
from indictune.distributed import elastic
from indictune.errors import Problem, UserError, problem, problems_of
from indictune.files import AUTO

FLAG = "--resume_from_checkpoint"


def check_resume(plan: AnyPlan) -> list[Problem]:
    """Refuse a checkpoint that does not exist, is not trusted, or does not fit the plan."""
    return [*_check_restarts(plan), *problems_of(_check_checkpoint, plan)]


def resumed_checkpoint(plan: AnyPlan) -> Path | None:
    """The checkpoint that a plan without problems resumes from, as far as this node's disk shows it."""
    return _at_a_glance(plan).checkpoint


def _check_restarts(plan: AnyPlan) -> list[Problem]:
    """Refuse a launcher that restarts a command with a named checkpoint. Without a name it resumes by itself."""
    asked, max_restarts = plan.training.resume_from_checkpoint, elastic.limit(plan.environ)
    if not max_restarts or asked in (None, AUTO):
        return []
    return [problem("restarts-from-named-checkpoint", FLAG, asked, max_restarts=max_restarts)]


def _check_checkpoint(plan: AnyPlan) -> None:
    point, trusts = _at_a_glance(plan), plan.model.trust_checkpoint
    for each in filter(None, (point.checkpoint, point.best)):
        check_trusted(each, plan.output_dir, trusts)
    if point.checkpoint is not None and plan.launch.is_known:
        compatibility.check_fits(point.checkpoint, plan.launch, plan.configuration, plan.model_values)


def _at_a_glance(plan: AnyPlan) -> ResumePoint:
    """The resume point, as far as this node's disk and the sizes of large files show it."""
    try:
        return choose_resume_point(plan.output_dir, plan.training.resume_from_checkpoint, Reader(thorough=False))
    except UserError:
        if plan.launch.is_one_node:
            raise
        return ResumePoint()  # another node's disk may hold the checkpoint
