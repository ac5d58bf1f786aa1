"""One run from typed command to exit code: how it ends, and who tells it."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NoReturn, cast

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from indictune.config import Recipe
from indictune.errors import UserError
from indictune.strategy import launch, restart
from indictune.training import disks, output, stopping
from indictune.training.disks import SaveError
from indictune.training.nonfinite import NonFiniteLossError
from indictune.training.session import Session
from indictune.training.stopping import Stopped

EXIT_OK, EXIT_FAILED, EXIT_USER_ERROR, EXIT_RESUMABLE = 0, 1, 2, 75
_CODES: dict[output.State, int] = {
    "ok": EXIT_OK,
    "failed": EXIT_FAILED,
    "user_error": EXIT_USER_ERROR,
    "resumable": EXIT_RESUMABLE,
}
# How long rank 0 may take to tell of a problem that another rank has found too: what the user gave is the same for all
# ranks, on machines however busy; a failure may be this rank's alone, and holds up the others.
SECONDS_FOR_RANK_0: dict[output.State, float] = {"user_error": 20.0, "failed": 5.0, "resumable": 5.0}
GO_ON = "--resume_from_checkpoint auto goes on with it."
INTERRUPTED = (
    "interrupted before it could save. --resume_from_checkpoint auto goes on from the last checkpoint, if any."
)


def run(main: Callable[[Session], None], recipe: Recipe, replaceable: Collection[str] = ()) -> int:
    """Run a training script's `main` and turn how it ends into a message, `status.json` and an exit code.

    Args:
        main: the script.
        recipe: what the user gave, problems included.
        replaceable: files in `--output_dir` that do not make it another run's.

    Returns:
        0 it did what was asked, 2 a problem in what the user gave, 75 it was stopped and can
        go on, 1 a failure of ours.
    """
    session = Session(recipe, launch.rank_of(os.environ))
    auto = recipe.values.get("resume_from_checkpoint") == output.AUTO
    if auto and output.is_finished(session.output_dir) and not recipe.problems:
        if session.rank == 0:
            print(f"{session.output_dir}: this run is finished; there is nothing to resume.")
        return EXIT_OK
    if restart.count(os.environ) and _was_stopped_before(session.output_dir):
        return EXIT_RESUMABLE
    started = time.time()
    session.end = partial(_end, session, started)
    with session.stop_request.listening():
        state, message = _outcome(main, session, replaceable)
        session.stop_request.ignore()  # a launcher sends SIGTERM to all when one has ended
        if session.ranks is not None:
            session.ranks.ended(state, message)
        if state != "ok":
            state, message = _first_cause(session, state, message)
        _tell(session, state, message, started)
    if torch.distributed.is_initialized() and state == "ok":
        torch.distributed.destroy_process_group()
    return _CODES[state]


def _was_stopped_before(output_dir: Path) -> bool:
    """Whether the run was asked to stop since its launcher began: torchrun takes exit code 75 for a failure, and with
    `--max-restarts` starts again what was to end."""
    launched: float = psutil.Process(os.getppid()).create_time()
    return output.stopped_at(output_dir) > launched


def _outcome(
    main: Callable[[Session], None], session: Session, replaceable: Collection[str]
) -> tuple[output.State, str]:
    """How this rank's run ended, and what there is to say of it."""
    try:
        stopping.let_through()
        stopping.end_with_launcher(os.environ)
        session.open_log(replaceable)
        main(session)
    except UserError as error:
        return "user_error", error.message
    except (NonFiniteLossError, SaveError) as error:
        return "failed", str(error)
    except Stopped as error:
        return "resumable", f"{error} {GO_ON}"
    except KeyboardInterrupt:
        return "resumable", INTERRUPTED
    except (Exception, CheckpointException) as error:  # torch's own is none of the first
        told = disks.message_of(error, session.output_dir) if isinstance(error, OSError) else None
        if told is not None:
            return "failed", told
        logging.getLogger().exception("the run failed")
        if session.rank == 0:
            traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}"
    return "ok", ""


def _first_cause(session: Session, state: output.State, message: str) -> tuple[output.State, str]:
    """How the run ended, where another rank ended first: what this one saw may be no more than a broken connection, or
    the SIGTERM that a launcher sends to those that are left."""
    ranks = session.ranks
    if ranks is None or ranks.world_size == 1 or state == "user_error":
        return state, message
    first = ranks.first_end()
    if first is not None:
        rank, its_state, its_message = first
        if its_state == state == "resumable":
            return state, message
        return cast(output.State, its_state), f"[rank {rank}] {its_message}"
    if state == "failed":
        return state, "; ".join([*ranks.missing(), message])
    gone = ranks.gone()
    return ("failed", "; ".join(gone)) if gone else (state, message)


def _end(session: Session, started: float, message: str) -> NoReturn:
    """Tell why the run has failed and end the process, whatever its main thread does."""
    try:
        _tell(session, "failed", message, started)
    finally:
        os._exit(EXIT_FAILED)


def _tell(session: Session, state: output.State, message: str, started: float) -> None:
    """Tell how the run ended, from one rank."""
    if session.rank == 0:
        _report(session, state, message)
    elif state != "ok":
        _speak_if_rank_0_does_not(session, state, message, started)


def _report(session: Session, state: output.State, message: str) -> None:
    """Tell the user how the run ended, on the console and in `status.json`, unless that is of a run that goes on."""
    if message:
        session.tell(f"indictune: {message}")
    if session.is_named and session.has_folder:
        try:
            output.write_status(session.output_dir, state, message)
        except OSError as error:
            session.tell(f"indictune: status.json could not be written: {error}")


def _speak_if_rank_0_does_not(session: Session, state: output.State, message: str, started: float) -> None:
    """Wait until rank 0 has told the same problem, and tell it from here only if it has not.

    The launcher ends the other processes as soon as one has ended, so a rank that does not wait would cut rank 0's
    message off; and a problem of one rank alone (a file that is missing on its node) would never be heard.
    """
    status = session.output_dir / "status.json"
    deadline = time.time() + SECONDS_FOR_RANK_0[state]
    while time.time() < deadline:
        if session.is_named and status.exists() and status.stat().st_mtime >= started:
            return
        time.sleep(0.1)
    _report(session, state, f"[rank {session.rank}] {message}")
