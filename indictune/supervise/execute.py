"""One run from typed command to exit code: how it ends, and who tells it."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from indictune import stop_signals
from indictune.cache_folders import checkpoint_around
from indictune.checkpoint import compatibility, disk_errors
from indictune.checkpoint.disk_errors import SaveError
from indictune.checkpoint.resume import Finished
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.distributed import elastic, launch
from indictune.errors import UserError
from indictune.exit_with_launcher import end_with_launcher
from indictune.files import AUTO, NOTHING_TO_DO, is_finished
from indictune.hub import push
from indictune.run import Run
from indictune.stop_signals import EXIT_RESUMABLE, NotBegun, Stopped
from indictune.supervise import run_folder
from indictune.supervise.supervised_run import SupervisedRun
from indictune.train.nonfinite import NonFiniteLossError

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR = 0, 1, 2
_CODES: dict[run_folder.State, int] = {
    "ok": EXIT_OK,
    "failed": EXIT_FAILED,
    "user_error": EXIT_USER_ERROR,
    "resumable": EXIT_RESUMABLE,
}
# How long rank 0 may take to tell of a problem that another rank has found too: what the user gave is the same for all
# ranks, on machines however busy; a failure may be this rank's alone, and holds up the others.
SECONDS_FOR_RANK_0: dict[run_folder.State, float] = {"user_error": 20.0, "failed": 5.0, "resumable": 5.0}
SECONDS_TO_TELL = 2.0  # of the others, when a connection is broken
GO_ON = "--resume_from_checkpoint auto goes on with it."
INTERRUPTED = (
    "interrupted before it could save. --resume_from_checkpoint auto goes on from the last checkpoint, if any."
)
AGAIN = "The same command begins again."  # of those that do not train


class End(NamedTuple):
    """How a run ended.

    Attributes:
        state: for `status.json`.
        message: for the user; empty where there is nothing to say.
        trace: of this rank's error, where it is not one that the user can mend.
        before_training: whether this rank was asked to stop before its first step.
    """

    state: run_folder.State
    message: str
    trace: str = ""
    before_training: bool = False


def execute(main: Callable[[Run], None], recipe: Recipe, replaceable: Collection[str] = ()) -> int:
    """Run a training script's `main` and turn how it ends into a message, `status.json` and an exit code.

    Args:
        main: the script.
        recipe: what the user gave, problems included.
        replaceable: files in `--output_dir` that do not make it another run's.

    Returns:
        0 it did what was asked, 2 a problem in what the user gave, 75 it was stopped and can
        go on, 1 a failure of ours.
    """
    run = SupervisedRun(recipe, launch.rank_of(os.environ))
    auto = recipe.values.get("resume_from_checkpoint") == AUTO
    # Another node's disk may say otherwise: several agree when they have met (`resume.end_if_finished`).
    is_one_node = launch.local_world_size_of(os.environ) == launch.world_size_of(os.environ)
    if auto and is_one_node and is_finished(run.output_dir) and not recipe.problems:
        end = _when_finished(run, f"{run.output_dir}: {NOTHING_TO_DO}")
        # A command that was refused since has told of itself.
        if run.rank == 0 and (end.state, _spoken(run, 0.0).get("state")) != ("ok", "ok"):
            _report(run, end)
        return _CODES[end.state]
    if elastic.count(os.environ) and _was_stopped_before(run.output_dir):
        return EXIT_RESUMABLE
    started = psutil.Process().create_time()  # another rank may have told its end before this one has come here
    run.end = partial(_end, run, started)
    with run.stop_request.listening():
        end = _outcome(main, run, replaceable)
        # Before any file has it.
        end = end._replace(message=without_tokens(end.message), trace=without_tokens(end.trace))
        run.stop_request.ignore()  # a launcher sends SIGTERM to all when one has ended
        run.ranks.report_end(end.state, end.message, end.before_training)
        if end.state != "ok":
            end = _first_cause(run, end, started)
        _tell(run, end, started)
        if end.state == "failed":
            run.ranks.kill_stopped()
    if torch.distributed.is_initialized() and end.state == "ok":
        torch.distributed.destroy_process_group()
    return _CODES[end.state]


def _was_stopped_before(output_dir: Path) -> bool:
    """Whether the run was asked to stop since its launcher began: torchrun takes exit code 75 for a failure, and with
    `--max-restarts` starts again what was to end."""
    launched: float = psutil.Process(os.getppid()).create_time()
    return run_folder.stopped_at(output_dir) > launched


def _outcome(main: Callable[[Run], None], run: SupervisedRun, replaceable: Collection[str]) -> End:
    """How this rank's run ended, and what there is to say of it."""
    try:
        stop_signals.let_through()
        end_with_launcher()  # done long ago, but by `indictune evaluate`
        run.open(replaceable)
        main(run)
    except Finished as done:
        return _when_finished(run, str(done))
    except UserError as error:
        return End("user_error", error.message)
    except (NonFiniteLossError, SaveError) as error:
        return End("failed", str(error))
    except Stopped as error:
        names_one = run.recipe.values.get("resume_from_checkpoint") not in (None, AUTO)
        not_begun = isinstance(error, NotBegun)
        begins_again = replaceable or (names_one and not_begun)
        return End("resumable", f"{error} {AGAIN if begins_again else GO_ON}", before_training=not_begun)
    except KeyboardInterrupt:
        stop_signals.kill_programs()
        return End("resumable", f"interrupted. {AGAIN}" if replaceable else INTERRUPTED)
    except (Exception, CheckpointException) as error:  # torch's own is none of the first
        told = disk_errors.message_of(error, run.output_dir) if isinstance(error, OSError) else None
        if told is not None:
            return End("failed", told)
        logging.getLogger().exception("the run failed")
        return End("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    return End("ok", "")


def _when_finished(run: SupervisedRun, message: str) -> End:
    """Tell that the run is finished, and what its command asks for in vain; returns how it ends."""
    training = unresolved(IndicTrainingArguments, run.recipe.values)
    asked = {name: getattr(training, name) for name in push.OF_A_PUSH}
    if asked["push_to_hub"] and (unpushed := run_folder.not_pushed(run.output_dir)):
        return End("failed", unpushed)
    trained = compatibility.settings_of(run.output_dir)
    if in_vain := push.asked_in_vain(run.output_dir, asked, trained):
        return End("user_error", in_vain)
    run.show(message)
    if run.rank == 0:
        for note in compatibility.differences_when_finished(run.output_dir, run.recipe.values):
            run.show_error(f"warning: {note}")
    return End("ok", "")


def _first_cause(run: SupervisedRun, end: End, started: float) -> End:
    """How the run ended, where it ended because of another rank: what this one saw may be no more than a broken
    connection, or the SIGTERM that a launcher sends to those that are left."""
    ranks = run.ranks
    if ranks.world_size == 1 or end.state == "user_error" or not run.is_named:
        return end
    spoken = _spoken(run, started)  # by a rank that was tired of waiting, or was refused and has no log
    if spoken.get("state") in ("user_error", "failed"):
        return End(cast(run_folder.State, spoken["state"]), spoken["message"])
    first = ranks.first_end()
    told = None if first is None else End(cast(run_folder.State, first[1]), f"[rank {first[0]}] {first[2]}")
    if told is not None and told.state == "user_error":
        return told
    others = [*(ranks.gone() if end.state == "resumable" else _lost(run)).values()]
    spoken = _spoken(run, started)  # after a look at who is gone: who had not begun has told it there before
    if others and spoken.get("state", "ok") != "ok":
        return End(cast(run_folder.State, spoken["state"]), spoken["message"])
    if others:
        errors = [each.message for each in (told or end,) if each.state == "failed"]
        return End("failed", "; ".join([*others, *errors]))
    is_the_same = first is not None and first[1:] == end[:2]  # what all ranks have run into
    cause = end if told is None or is_the_same or told.state == end.state == "resumable" else told
    if cause.state != "failed" or not (cause.trace or cause is told) or not ranks.without_end():
        return cause
    # That one was killed on another machine the others see by the connection alone, and tell it at about one time.
    time.sleep(SECONDS_TO_TELL)
    return cause._replace(message="; ".join([cause.message, *ranks.without_end().values()]))


def _lost(run: SupervisedRun) -> dict[int, str]:
    """A sentence for each other rank that this one has waited for in vain: it is dead, or late."""
    late = {} if run.watchdog is None else run.watchdog.waits_for()
    return late | run.ranks.dead()


def _end(run: SupervisedRun, started: float, message: str, state: run_folder.State = "failed") -> NoReturn:
    """Tell why the run has ended, if no rank has told, and end the process and what it has started, whatever its main
    thread does.

    The other ranks hear of it last, and need not tell it again. Those of another launcher hear of it in no other way.
    """
    try:
        if _spoken(run, started).get("state", "ok") == "ok":
            _tell(run, End(state, message), started)
        if state == "failed":
            run.ranks.kill_stopped()
        stop_signals.signal_programs(signal.SIGKILL)
    finally:
        try:
            if not run.ranks.has_ended:  # else its main thread has told more
                run.ranks.report_end(state, message)
        finally:
            os._exit(_CODES[state])


def _tell(run: SupervisedRun, end: End, started: float) -> None:
    """Tell how the run ended, from one rank."""
    if run.rank != 0:
        if end.state != "ok":
            _speak_if_rank_0_does_not(run, end, started)
    elif _spoken(run, started) != {"state": end.state, "message": end.message}:
        print(printable(end.trace), end="", file=sys.stderr, flush=True)
        _report(run, end)


def _spoken(run: SupervisedRun, started: float) -> dict[str, str]:
    """What a rank has told of how this run ended; empty where none has."""
    return run_folder.status_since(run.output_dir, started) if run.is_named else {}


def _report(run: SupervisedRun, end: End) -> None:
    """Tell the user how the run ended, on the console and in `status.json`, unless that is of a run that goes on.

    Where it is, rank 0 has been refused and says so, and the others say nothing.
    """
    has_folder = run.owns_folder
    if run.rank != 0 and not has_folder:
        return
    if end.message:
        run.show_error(f"indictune: {end.message}")
    if run.is_named and has_folder and checkpoint_around(run.output_dir) is None:
        try:
            run_folder.write_status(run.output_dir, end.state, end.message)
        except OSError as error:
            run.show_error(f"indictune: status.json could not be written: {error}")


def _speak_if_rank_0_does_not(run: SupervisedRun, end: End, started: float) -> None:
    """Wait until rank 0 has told a problem too, and tell it from here only if it has not.

    The launcher ends the other processes as soon as one has ended, so a rank that does not wait would cut rank 0's
    message off; and a problem of one rank alone (a file that is missing on its node) would never be heard. Where all
    ranks before this one are lost, it is the first that can tell; NCCL may end its process soon.
    """
    is_first = end.state == "failed" and _lost(run).keys() >= set(range(run.rank))
    deadline = time.time() + (0.0 if is_first else SECONDS_FOR_RANK_0[end.state])
    while _spoken(run, started).get("state", "ok") == "ok":
        if time.time() > deadline:
            _report(run, end._replace(message=f"[rank {run.rank}] {end.message}"))
            return
        time.sleep(0.1)
