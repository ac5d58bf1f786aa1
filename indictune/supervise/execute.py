"""One run from typed command to exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple, NoReturn, cast

import psutil
import torch
from torch.distributed.checkpoint.api import CheckpointException

from indictune.checkpoint import compatibility, save, store
from indictune.checkpoint.resume import Finished
from indictune.checkpoint.save import SaveError
from indictune.config.arguments import IndicTrainingArguments
from indictune.config.plan import unresolved
from indictune.config.recipe import Recipe
from indictune.console_text import printable
from indictune.credentials import without_tokens
from indictune.distributed import agreement, elastic, launch
from indictune.distributed.agreement import DivergedError
from indictune.errors import Problem, UserError
from indictune.files import AUTO, NOTHING_TO_DO, checkpoint_around, is_finished
from indictune.run import Run
from indictune.stop_signals import (
    EXIT_RESUMABLE,
    Stopped,
    StoppedBeforeFirstStep,
    kill_programs,
    killed_processes,
    signal_programs,
    unblock_stop_signals,
)
from indictune.supervise import run_folder
from indictune.supervise.run_folder import RankLog, lock_run_folder, of_another_launch, wait_for_other_launch
from indictune.supervise.watchdog import Ranks, Watchdog
from indictune.training.bad_steps import NonFiniteLossError

logger = logging.getLogger("indictune")

# How long another rank waits for rank 0 to report. The user's mistakes are the same on all ranks, on machines however
# busy. A failure may be this rank's alone, and holds up the others.
RANK_0_WAIT_S: dict[run_folder.State, float] = {"user_error": 20.0, "failed": 5.0, "resumable": 5.0}
_END_WAIT_S = 2.0  # how long a rank waits for another one's report of the same failure
_RESUME = "--resume_from_checkpoint auto resumes it."
_RESUME_LAST = "--resume_from_checkpoint auto resumes from the last checkpoint, if any."
_TRAIN_ON = "To train it on with these, name its last checkpoint by --resume_from_checkpoint."
_AGAIN = "The same command begins again."


class SupervisedRun(Run):
    """A run with its lock, log and watchdog.

    Attributes:
        started: when this process began, in seconds since 1970. Reports from before are not of this run.
        killed_before: processes that the kernel had killed for lack of memory when the run began.
        watchdog: of this rank; None for one process, and before `open`.
        end: reports how the run ended, and ends the process, whatever its main thread does.
    """

    watchdog: Watchdog | None = None
    end: Callable[..., None]

    def __init__(self, recipe: Recipe, rank: int) -> None:
        super().__init__(recipe, rank)
        self._lock: object = None
        self._launch_name = elastic.launch_name(os.environ)  # now: accelerate (1.15) writes to the environment
        self.killed_before = killed_processes()
        self.ranks = Ranks.of_launch(self.output_dir / "logs", os.environ)
        # psutil (7) may be a second early, and a lone process would take the report of the command before for its own.
        self.started = psutil.Process().create_time() if self.ranks.world_size > 1 else time.time()

    def open(self, replaceable: Collection[str]) -> None:
        """Lock the folder and start this rank's log, unless the recipe is refused already; `replaceable` as `execute`.

        A recipe file that cannot be read is refused at once: what it does not say is not missing.
        """
        if not self.recipe.is_read:
            self.recipe.problems.raise_any()
        asked = self.recipe.values.get("resume_from_checkpoint")
        with self.recipe.problems.collecting():
            if not self.is_named and not replaceable:  # such a command has a folder of its own
                raise UserError("output-dir-missing", "--output_dir")
            run_folder.check_folder(self.output_dir)
            run_folder.check_free(self.output_dir, asked, replaceable)
        if self.recipe.problems:
            if self.rank != 0:
                logger.addHandler(logging.NullHandler())  # else logging prints warnings, on every rank
            return
        try:
            self.output_dir.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: no other user writes
            tempfile.TemporaryFile(dir=self.output_dir).close()  # its lock may be writable all the same
            wait_for_other_launch(self.output_dir, self._launch_name, self.rank)
            if self.rank == 0:
                self.lock_folder()
                run_folder.check_free(self.output_dir, asked, replaceable)  # again, now that nobody else writes
                (self.output_dir / run_folder.STATUS).unlink(missing_ok=True)
            log = RankLog(self.output_dir, self.rank, self.recipe.values.get("verbose", False))
            self.results, self.console = log.results, log.console
            self.stop_request.report_to = log.descriptors
            self.ranks.begin()
            if self.ranks.world_size > 1:
                # A collective gives up after `--ddp_timeout`; half of that is long for anything.
                timeout_s = unresolved(IndicTrainingArguments, self.recipe.values).ddp_timeout
                patience_s = max(1, timeout_s) / 2
                self.watchdog = Watchdog(self.ranks, patience_s, log.path, self.stop_request.ask, self.end)
                self.watchdog.start()
        except OSError as error:
            flag = "--output_dir"
            raise UserError("folder-not-writable", flag, self.output_dir, reason=error.strerror) from error

    def lock_folder(self) -> None:
        self._lock = lock_run_folder(self.output_dir, self._launch_name)

    @property
    def owns_folder(self) -> bool:
        """Whether no other run writes to the folder, as far as this machine's kernel knows."""
        return of_another_launch(self.output_dir, self._launch_name) is None

    def reported(self) -> dict[str, str]:
        """`status.json`, if a rank reported since this process began that the run did not end well."""
        status = run_folder.status_since(self.output_dir, self.started) if self.is_named else {}
        return {} if status.get("state") == "ok" else status

    def lost(self) -> dict[int, str]:
        """A sentence for each other rank that this one waits for: it is dead or late."""
        late = {} if self.watchdog is None else self.watchdog.waits_for()
        return late | self.ranks.dead()


class End(NamedTuple):
    """How a run ended: a message for the user, a trace unless the user can mend it, and what the user gave wrongly."""

    state: run_folder.State
    message: str
    trace: str = ""
    problems: tuple[Problem, ...] = ()


def execute(main: Callable[[Run], None], recipe: Recipe, replaceable: Collection[str] = ()) -> int:
    """Run a script's `main` and turn how it ends into a message, `status.json` and an exit code.

    Files of an earlier command of this kind, `replaceable`, may be overwritten in `--output_dir`.

    Returns:
        0 done, 2 a problem in what the user gave, 75 stopped and can be resumed, 1 any other failure.
    """
    training = unresolved(IndicTrainingArguments, recipe.values)
    rows, rows_at_once = training.global_batch_size, training.per_device_train_batch_size
    shares_rows = bool(replaceable) or training.max_tokens_per_device is not None
    fixed_rows = None if shares_rows else rows_at_once
    world = elastic.choose_world(os.environ, rows, fixed_rows, recipe.values.get("deepspeed"))
    if elastic.most_restarts(os.environ) and not replaceable:
        recipe.values.setdefault("resume_from_checkpoint", AUTO)
    run = SupervisedRun(recipe, launch.rank_of(os.environ))
    resumes = recipe.values.get("resume_from_checkpoint") == AUTO and not recipe.problems
    # Several nodes decide together, in `start_ranks`.
    if resumes and run.ranks.all_here and is_finished(run.output_dir):
        end = _end_of_finished(run, f"{run.output_dir}: {NOTHING_TO_DO}")
        if end.state != "ok" or run_folder.status_since(run.output_dir, 0.0).get("state") != "ok":
            _report(run, end)
        return run_folder.EXIT_CODES[end.state]
    if world.idle and run.rank >= world.used:
        return elastic.wait_idle()
    if _was_stopped_before(run):
        return EXIT_RESUMABLE
    run.end = partial(_end_process, run)
    with run.stop_request.listening():
        end = _outcome(main, run, replaceable, world.notes(os.environ, rows, rows_at_once))
        # Before any file has it.
        end = end._replace(message=without_tokens(end.message), trace=without_tokens(end.trace))
        run.stop_request.ignore()  # a launcher sends SIGTERM to all when one has ended
        run.ranks.report_end(end.state, end.message)
        if end.state == "user_error" and not launch.is_one_node(os.environ):
            agreement.tell_other_nodes(os.environ, end.message)
        end = _cause(run, end)
        _tell(run, end)
        if end.state == "failed":
            run.ranks.kill_stopped()
    if torch.distributed.is_initialized() and end.state == "ok":
        if run.rank == 0 and world.idle:
            world.release_idle()
        torch.distributed.destroy_process_group()
    return run_folder.EXIT_CODES[end.state]


def _was_stopped_before(run: SupervisedRun) -> bool:
    """Whether the run was asked to stop since its launcher began, on one node.

    torchrun takes exit code 75 for a failure, and with `--max-restarts` starts a stopped run again. On several nodes
    that is right: the request may be to one node alone, and the others continue.
    """
    if not elastic.restarts_so_far(os.environ) or not run.ranks.all_here:
        return False
    newest = next(map(store.read_manifest, store.checkpoints_in(run.output_dir)), None)
    if newest is not None and newest.world_size > launch.local_world_size_of(os.environ):  # it was elsewhere too
        return False
    launched: float = psutil.Process(os.getppid()).create_time()
    return run_folder.status_since(run.output_dir, launched).get("state") == "resumable"


def _outcome(
    main: Callable[[Run], None], run: SupervisedRun, replaceable: Collection[str], notes: Collection[str]
) -> End:
    try:
        unblock_stop_signals()
        run.open(replaceable)
        run.warn(notes)
        main(run)
    except Finished as done:
        return _end_of_finished(run, str(done))
    except UserError as error:
        return End("user_error", error.message, problems=tuple(error.problems))
    except (NonFiniteLossError, DivergedError, SaveError) as error:
        return End("failed", _explanation(run, error) or str(error))
    except StoppedBeforeFirstStep as error:
        return End("resumable", f"{error} {_AGAIN}")
    except Stopped as error:
        return End("resumable", f"{error} {_RESUME}")
    except KeyboardInterrupt:
        kill_programs()
        return End("resumable", f"interrupted before it could save. {_AGAIN if replaceable else _RESUME_LAST}")
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        if message := _explanation(run, error):
            logging.getLogger().info("the run failed", exc_info=True)
            return End("failed", message)
        message = save.message_of(error, run.output_dir) if isinstance(error, OSError) else None
        if message is not None:
            return End("failed", message)
        logging.getLogger().exception("the run failed")
        return End("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    return End("ok", "")


def _explanation(run: SupervisedRun, error: BaseException) -> str | None:
    from indictune.planning.machine_failures import explain_failure  # only a run that fails needs it

    return explain_failure(error, run.plan, run.killed_before, run.trainer)


def _why_gone(run: SupervisedRun) -> list[str]:
    from indictune.planning.machine_failures import why_gone

    return why_gone(run.plan, run.killed_before)


def _end_of_finished(run: SupervisedRun, message: str) -> End:
    """Report that the run is finished and what this command gives otherwise, and push it if an earlier push failed."""
    try:
        changes = compatibility.changes_of_finished(run.output_dir, run.recipe.values)
    except UserError as error:
        return End("user_error", error.message, problems=tuple(error.problems))
    if run.rank == 0:
        args = unresolved(IndicTrainingArguments, run.recipe.values)
        if args.push_to_hub:
            from indictune.hub import publish

            try:
                publish.publish_run(run.output_dir, args)
            except publish.PushError as error:
                return End("failed", str(error))
        run.show(f"{message} {changes} {_TRAIN_ON}" if changes else message)
    return End("ok", "")


def _cause(run: SupervisedRun, end: End) -> End:
    """How the whole run ended, if this rank ended because of another one.

    This rank may have seen only a broken connection, or the SIGTERM that a launcher sends to the ranks that are left.
    """
    if end.state in ("ok", "user_error") or run.ranks.world_size == 1:
        return end
    first = run.ranks.first_end(_END_WAIT_S)
    other = None if first is None else End(cast(run_folder.State, first[1]), f"[rank {first[0]}] {first[2]}")
    if other is not None and other.state == "user_error":
        return other
    lost = run.ranks.gone() | run.ranks.gone_before() if end.state == "resumable" else run.lost()
    if reported := run.reported():
        return End(cast(run_folder.State, reported["state"]), reported["message"])
    if lost:
        errors = [each.message for each in (other or end,) if each.state == "failed"]
        return End("failed", "; ".join([*lost.values(), *errors, *_why_gone(run)]))
    all_failed_alike = first is not None and first[1:] == end[:2]
    if other is None or all_failed_alike or other.state == end.state == "resumable":
        return end
    return other


def _end_process(run: SupervisedRun, message: str, state: run_folder.State = "failed") -> NoReturn:
    """Report why the run ended, and end the process and all that it started, whatever its main thread does.

    The heartbeat follows last: other ranks need not report the end again.
    """
    try:
        if run.ranks.gone():
            message = "; ".join([message, *_why_gone(run)])
        if not run.reported():
            _tell(run, End(state, message))
        if state == "failed":
            run.ranks.kill_stopped()
        signal_programs(signal.SIGKILL)
    finally:
        try:
            if not run.ranks.has_ended:  # else its main thread reported more
                run.ranks.report_end(state, message)
        finally:
            os._exit(run_folder.EXIT_CODES[state])


def _tell(run: SupervisedRun, end: End) -> None:
    """Report how the run ended, from one rank.

    Rank 0 reports. The launcher ends all ranks as soon as one has ended, so another rank waits for that. It reports
    itself if rank 0 is lost or saw no problem, such as a file that is missing on one node.
    """
    if run.rank == 0:
        if not run.reported():
            print(printable(end.trace), end="", file=sys.stderr, flush=True)
            _report(run, end)
    elif end.state != "ok":
        is_first = end.state == "failed" and 0 in run.lost()
        deadline = time.monotonic() + (0.0 if is_first else RANK_0_WAIT_S[end.state])
        while not run.reported():
            if time.monotonic() > deadline:
                _report(run, end._replace(message=f"[rank {run.rank}] {end.message}"))
                return
            time.sleep(0.1)


def _report(run: SupervisedRun, end: End) -> None:
    """Report how the run ended, on the console and in `status.json`.

    If another run has the folder, its `status.json` stays, and only rank 0 reports. That of a finished run stays too
    when a second command is refused, which changes nothing in the folder.
    """
    has_folder = run.owns_folder
    if run.rank != 0 and not has_folder:
        return
    if end.message:
        run.show_error(f"indictune: {end.message}")
    is_own = run.is_named and has_folder and checkpoint_around(run.output_dir) is None
    if end.state == "user_error" and is_own and is_finished(run.output_dir):
        is_own = run_folder.status_since(run.output_dir, 0.0).get("state") != "ok"
    try:
        run_folder.write_status(run.output_dir if is_own else None, end.state, end.message, end.problems)
    except OSError as error:
        run.show_error(f"indictune: status.json could not be written: {error}")
