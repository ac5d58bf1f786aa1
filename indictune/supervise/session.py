"""What every training script shares: the arguments, the process group, and what is decided before it trains."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
from transformers import PreTrainedConfig, set_seed

from indictune.checkpoint import abandoned, compatibility, copying, disk_errors, flag_files, resume, store
from indictune.config.arguments import IndicTrainingArguments, ModelArguments, check_fixed
from indictune.config.plan import Launch
from indictune.config.recipe import Recipe, resolved
from indictune.console_text import printable
from indictune.distributed import (
    batch_size,
    deepspeed_config,
    elastic,
    launch,
    launch_check,
    node_disks,
    process_group,
    sharding,
    tf32,
    torch_compile,
)
from indictune.distributed.async_shards import check_async_save, check_kept_in_shards
from indictune.distributed.communication import check_communication
from indictune.distributed.strategy_limits import check_split_optimizer, check_weights, default_optimizer
from indictune.errors import UserError
from indictune.models.adapters import check_published_base, without_effect
from indictune.models.load import check_max_length, stored_quantisation
from indictune.models.unpadded import padding_notes
from indictune.preflight.integrations import check_services
from indictune.preflight.values import check_evaluations, check_optimizer, check_values
from indictune.supervise import lock, run_folder
from indictune.supervise.heartbeat import Ranks, Watchdog
from indictune.supervise.logs import RankLog
from indictune.supervise.signals import StopRequest

logger = logging.getLogger("indictune")

Arguments = TypeVar("Arguments")
Training = TypeVar("Training", bound=IndicTrainingArguments)
Check = Callable[[ModelArguments, PreTrainedConfig], None]


class Session:
    """What a script asks of its run: the arguments, the process group, and what was decided for it.

    Attributes:
        recipe: what the user gave.
        output_dir: of the run.
        rank: of this process.
        launch: what the launcher asked for.
        checkpoint: folder of the checkpoint to go on from, or None; set by `start`.
        saved_files: names of what the run has saved as its model; set where files are written.
        stop_request: whether a signal asks this process to stop.
        ranks: of the run.
        watchdog: of this rank; None where there is one process, or nothing is trained.
        end: tells why and how the run has ended and ends the process, whatever its main thread does; set by `run`.
    """

    checkpoint: str | None = None
    saved_files: Collection[str] = ()
    watchdog: Watchdog | None = None
    end: Callable[..., None]

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.recipe = recipe
        self.rank = rank
        self.is_named = bool(recipe.values.get("output_dir"))
        self.output_dir = Path(recipe.values.get("output_dir") or ".")
        self._built: list[Any] = []
        self._decided: dict[str, Any] = {}
        self._model: dict[str, Any] = {}
        self._log: RankLog | None = None
        self._lock: TextIO | None = None
        self.best_checkpoint: Path | None = None
        self.stop_request = StopRequest()
        self._launch_name = elastic.launch_name(os.environ)  # now: accelerate writes to the environment (1.15)
        self.ranks = Ranks.of_launch(self.output_dir / "logs", os.environ)

    def open_log(self, replaceable: Collection[str]) -> None:
        """Start writing to this rank's log file, unless the run is refused already (`output.check_free`).

        Raises:
            UserError: another run writes to the folder, or it cannot be written to; or the recipe file cannot be read,
                and what it does not say is not missing.
        """
        if not self.recipe.is_read:
            self.recipe.problems.raise_any()
        asked = self.recipe.values.get("resume_from_checkpoint")
        with self.checks():
            if not self.is_named and not replaceable:  # a command that may replace its files has a folder of its own
                raise UserError("--output_dir is missing: name the folder that the model and logs go to.")
            run_folder.check_folder(self.output_dir)
            self._check_free(asked, replaceable)
        if self.recipe.problems:
            if self.rank != 0:
                logger.addHandler(logging.NullHandler())  # else logging prints what it warns of, on every rank
            return
        try:
            self.output_dir.mkdir(mode=0o755, parents=True, exist_ok=True)  # whatever the umask: no other user writes
            run_folder.check_takes_files(self.output_dir)
            if self.rank == 0:
                self._lock = lock.held(self.output_dir, self._launch_name)
                run_folder.check_free(self.output_dir, asked, replaceable)  # from whoever had it until then
                run_folder.forget_status(self.output_dir)
            else:
                lock.wait_for_own_launch(self.output_dir, self._launch_name)
            self._log = RankLog(self.output_dir, self.rank, self.recipe.values.get("verbose", False))
            self.stop_request.tells = self._log.descriptors
            self.ranks.begin()
            if self.ranks.world_size > 1:
                self._watch(self._log.path)
        except OSError as error:
            raise disk_errors.refused(self.output_dir, error) from error

    def _check_free(self, asked: str | None, replaceable: Collection[str]) -> None:
        """`output.check_free`; to go on with a run is no way out while another process does."""
        try:
            run_folder.check_free(self.output_dir, asked, replaceable)
        except UserError:
            if self.rank == 0:
                lock.check_free(self.output_dir)
            raise

    @property
    def has_folder(self) -> bool:
        """Whether no other run writes to the folder, as far as the kernel of this machine can tell."""
        if self.rank != 0:
            return lock.of_another_launch(self.output_dir, self._launch_name) is None
        return self._lock is not None or lock.is_free(self.output_dir)

    def show(self, text: str) -> None:
        """Print a result to standard output, on rank 0."""
        if self.rank == 0:
            print(printable(text), file=self._log.results if self._log else sys.stdout, flush=True)

    def tell(self, text: str) -> None:
        """Print to standard error, whichever rank this is."""
        print(printable(text), file=self._log.console if self._log else sys.stderr, flush=True)

    def warn(self, notes: Iterable[str]) -> None:
        """Tell what the user should know, on the console and in the log."""
        for note in notes:
            logger.warning(note)

    def checks(self) -> AbstractContextManager[None]:
        """A block whose `UserError` is kept, to be told with all others."""
        return self.recipe.problems.collecting()

    def planned(self, arguments: type[Any], name: str) -> Any:
        """The value that a field will have: the given one, or its default. For checks that come before `build`."""
        return self.recipe.planned(arguments, name)

    @property
    def trusts_checkpoint(self) -> bool:
        """`--trust_checkpoint`: the user vouches for pickles."""
        return bool(self.planned(ModelArguments, "trust_checkpoint"))

    @cached_property
    def launch(self) -> Launch:
        """What the launcher asked for.

        Raises:
            UserError: it cannot be read, or contradicts itself.
        """
        planned = partial(self.planned, IndicTrainingArguments)
        self._decided["deepspeed"] = launch.deepspeed_file(os.environ, planned("deepspeed"))
        return launch.read_launch(os.environ, self._decided["deepspeed"], planned("fsdp"))

    def check_model(self, args: ModelArguments, config: PreTrainedConfig, max_length: int, of_task: Check) -> None:
        """Check that the model takes texts of this length, and can be trained and published as is asked.

        Args:
            args: name the model and the method.
            config: of the model.
            max_length: of a text, in tokens.
            of_task: what else the task asks of the model, by its shapes alone.
        """
        self._model = config.to_dict() | {"_commit_hash": vars(config).get("_commit_hash")}  # of one from the Hub
        with self.checks():
            asked = self.planned(IndicTrainingArguments, "resume_from_checkpoint")
            is_one_node = self.launch.local_world_size == self.launch.world_size  # else another's disk may tell
            holds_none = asked == run_folder.AUTO and resume.candidate(self.output_dir, asked) is None
            begins = asked is None or (holds_none and is_one_node)
            self.warn([*check_max_length(config, max_length, begins), *padding_notes(config, trains=True)])
        with self.checks():
            check_weights(self.launch, args, stored_quantisation(config))
            torch_compile.check_quantised(stored_quantisation(config))
        with self.checks():
            check_published_base(args, self.planned(IndicTrainingArguments, "push_to_hub"))
        with self.checks():
            of_task(args, config)
        self.warn(without_effect(args))

    def check_evaluations(self, arguments: type[IndicTrainingArguments], sources: Collection[str]) -> None:
        """Check what is compared during training (`values.check_evaluations`), by the splits that there are;
        without a training split, the dataset that was to have them could not be found."""
        if "train" in sources:
            check_evaluations(partial(self.planned, arguments), "validation" in sources)

    def build(self, arguments: type[Arguments], **decided: Any) -> Arguments:
        """The dataclass, filled from the recipe; it becomes part of `recipe.yaml`."""
        built = self.recipe.build(arguments, **decided)
        self._built.append(built)
        return built

    def decide(self, arguments: type[IndicTrainingArguments]) -> None:
        """Work out what follows from the launch and the recipe together; what cannot be goes to the problems."""
        planned = partial(self.planned, arguments)
        with self.checks():
            method = self.planned(ModelArguments, "method")
            optim = default_optimizer(self.launch, method, torch.cuda.is_available())
            if optim is not None and "optim" not in self.recipe.values:
                self._decided["optim"] = optim
            check_split_optimizer(self.launch, str(planned("optim")))
        with self.checks():
            elastic.check_one_node(os.environ)
            resume.check_restarts(planned("resume_from_checkpoint"), elastic.limit(os.environ))
        with self.checks():
            checkpoint = resume.candidate(self.output_dir, planned("resume_from_checkpoint"))
            if checkpoint is not None:
                resume.check_trusted(checkpoint, self.output_dir, self.trusts_checkpoint)
                known = {name: self._decided.get(name, planned(name)) for name in resume.LOOKED_AT}
                resume.check_fits(checkpoint, self.launch, resolved(*self._built) | known, self._model)
        with self.checks():
            check_services(planned, self.output_dir)
        with self.checks():
            check_fixed(planned)
        with self.checks():
            check_values(arguments, planned)
        with self.checks():
            check_optimizer(arguments, planned, self.launch.deepspeed or ())
        steps, world_size = None, launch.world_size_of(os.environ)
        with self.checks():
            if planned("max_tokens_per_device") is None:
                rows, at_once = planned("global_batch_size"), planned("per_device_train_batch_size")
                steps = batch_size.accumulation_steps(rows, at_once, world_size)
                self._decide_accumulation(steps, "--global_batch_size")
        with self.checks():
            torch_compile.check_compiling(planned, partial(self.planned, ModelArguments), os.environ)
        with self.checks():
            launch_check.check_visible_gpus(self.launch, torch.cuda.device_count())
            launch_check.check_fp16(planned("fp16"), torch.cuda.is_available())
            launch_check.check_mixed_precision(planned, os.environ)
        with self.checks():
            deepspeed_config.check_deepspeed(self.launch.deepspeed or {}, planned, steps)
            deepspeed_config.check_offloaded_optimizer(self.launch.strategy, str(planned("optim")))
            if "tf32" not in self.recipe.values and (decided := tf32.decided(planned)) is not None:
                self._decided["tf32"] = decided
        with self.checks():
            named = {"--resume_from_checkpoint": planned("resume_from_checkpoint")}
            deepspeed_config.check_folders(self.launch.strategy, {"--output_dir": str(self.output_dir), **named})
        with self.checks():
            check_communication(self.launch, method, planned, world_size, steps)
        with self.checks():
            check_kept_in_shards(self.launch, os.environ)
            if planned("async_save"):
                check_async_save(self.launch, method)
        with self.checks():
            deepspeed_config.check_bad_steps(self.launch.strategy, planned("on_nonfinite"))

    def fit_batches(
        self, arguments: type[IndicTrainingArguments], lengths: torch.Tensor, place: Callable[[int], str], padded: bool
    ) -> None:
        """Cut global batches as `--max_tokens_per_device` asks, if it does. `decide` comes first, `start` after it.

        Args:
            arguments: the training arguments.
            lengths: tokens of each training row, int64 [rows].
            place: tells where a training row stands.
            padded: whether rows are padded to the longest of their micro-batch.

        Raises:
            UserError: a row is too long, or the DeepSpeed file has other sizes.
        """
        planned = partial(self.planned, arguments)
        if (max_tokens := planned("max_tokens_per_device")) is None:
            return
        if (given := self.recipe.values.get("per_device_train_batch_size")) is not None:
            self.warn([f"--per_device_train_batch_size {given} counts for nothing: --max_tokens_per_device is given."])
        rows, world_size = planned("global_batch_size"), launch.world_size_of(os.environ)
        seed = planned("seed") if planned("data_seed") is None else planned("data_seed")
        run = batch_size.steps_of_run(len(lengths), rows, planned("max_steps"), planned("num_train_epochs"))
        steps = batch_size.accumulation_for_tokens(lengths, place, max_tokens, rows, world_size, seed, run, padded)
        sizes = {"per_device_train_batch_size": math.ceil(rows / (world_size * steps))}
        self._decided |= sizes
        self._decide_accumulation(steps, "--max_tokens_per_device")
        deepspeed_config.check_deepspeed(
            self.launch.deepspeed or {}, lambda name: sizes.get(name, planned(name)), steps
        )
        check_communication(self.launch, self.planned(ModelArguments, "method"), planned, world_size, steps)

    def _decide_accumulation(self, steps: int, flag: str) -> None:
        given = self.recipe.values.get("gradient_accumulation_steps", steps)
        if given != steps:
            raise UserError(
                f"--gradient_accumulation_steps {given}: it follows from {flag} and is {steps}; leave it out."
            )
        self._decided["gradient_accumulation_steps"] = steps

    def start(self, arguments: type[Training], has_validation: bool) -> Training:
        """Begin to train: the process group is up, and it is the one asked for. `decide` comes first.

        Args:
            arguments: the training arguments to build.
            has_validation: whether there are rows to evaluate on during training.

        Raises:
            UserError: a value or combination that transformers refuses, or another strategy came up.
            Finished: there is nothing to do.
        """
        if not has_validation:
            self._decided |= {"eval_strategy": "no", "load_best_model_at_end": False}
            self.warn(["No validation rows: nothing is evaluated during training, and the last weights are kept."])
        args = self._bring_up(arguments)
        check_kept_in_shards(self.launch, os.environ, args)
        self._choose_checkpoint(args)
        self.warn(resume.doubts_to_come(self.output_dir, self.trusts_checkpoint))
        if self.checkpoint is not None:
            logger.info("Going on from %s", self.checkpoint)
        elif self.recipe.values.get("resume_from_checkpoint") == run_folder.AUTO:
            logger.info("%s holds no whole checkpoint: starting afresh", self.output_dir)
            self.warn(abandoned.notes(self.output_dir))
        logger.info(
            "%s on %d process(es), global batch of %d rows = %d x %d rows x %d accumulation step(s)",
            *(self.launch.strategy, args.world_size, args.global_batch_size, args.world_size),
            *(args.per_device_train_batch_size, args.gradient_accumulation_steps),
        )
        return args

    def write_recipe(self, args: IndicTrainingArguments) -> None:
        """Write `recipe.yaml` on every disk, once it is known that the run may go on."""
        if args.should_save:
            whole = self.recipe.to_take_back(self._built, self._decided)
            run_folder.write_recipe(self.output_dir, whole | compatibility.in_the_states(self.checkpoint))
            flag_files.write(self.output_dir, self.in_files())

    def in_files(self) -> flag_files.Content:
        """What the files that flags name say of the steps."""
        return flag_files.read(resolved(*self._built), self.launch.deepspeed)

    def _choose_checkpoint(self, args: IndicTrainingArguments) -> None:
        """Set `checkpoint` and `best_checkpoint`, after what a killed run was writing is gone.

        Raises:
            UserError: another run writes to this disk, or the checkpoint is damaged or cannot be gone on with.
        """
        args.save_on_each_node = not node_disks.disk_is_shared(self.output_dir, args)
        if args.save_on_each_node and args.local_process_index == 0 and self.rank != 0:
            self._lock = lock.held_on_own_disk(self.output_dir, self._launch_name)
        if args.should_save:
            copying.recover(self.output_dir)
        sharding.barrier()
        asked = self.recipe.values.get("resume_from_checkpoint")
        resume.end_if_finished(self.output_dir, asked)
        found = store.listed(self.output_dir)  # what was given back counts too, and what is damaged is named
        if asked != run_folder.AUTO:
            found = [] if asked is None else [Path(asked)]
        chosen, self.best_checkpoint = resume.newest_whole(found, asked, args, self.trusts_checkpoint)
        for each in filter(None, (chosen, self.best_checkpoint)):
            resume.check_trusted(each, self.output_dir, self.trusts_checkpoint)
        if chosen is not None:
            configuration = resolved(*self._built)
            notes = resume.check_fits(chosen, self.launch, configuration, self._model)
            self.warn([*notes, *compatibility.differences(chosen, configuration, self.in_files(), args.world_size)])
        self.checkpoint = None if chosen is None else str(chosen)

    def _watch(self, log: Path) -> None:
        """Start the watchdog. A collective gives up after `--ddp_timeout`; half of that is long for anything."""
        patience_s = max(1, self.planned(IndicTrainingArguments, "ddp_timeout")) / 2
        self.watchdog = Watchdog(self.ranks, patience_s, log, self.stop_request.ask, self.end)
        self.watchdog.start()

    def decide_evaluation(self, arguments: type[IndicTrainingArguments]) -> None:
        """As `decide`, of an evaluation without training."""
        with self.checks():
            planned = partial(self.planned, arguments)
            torch_compile.check_compiling(planned, partial(self.planned, ModelArguments), os.environ)
            launch_check.check_mixed_precision(planned, os.environ)
            launch_check.check_visible_gpus(self.launch, torch.cuda.device_count())
            self.launch = launch.for_evaluation(self.launch, os.environ)
            self._decided["deepspeed"] = self._decided["deepspeed"] if self.launch.deepspeed is not None else None

    def start_evaluation(self, arguments: type[Training]) -> Training:
        """Begin to evaluate without training. `decide_evaluation` comes first.

        Raises:
            UserError: another strategy came up.
        """
        self._decided |= {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}
        return self._bring_up(arguments)

    def _bring_up(self, arguments: type[Training]) -> Training:
        """Start the process group, by the CPU stand-in where one is needed, and check that it is the right one."""
        decided, limits = process_group.bring_up(
            self.launch, os.environ, self.recipe.planned(arguments, "ddp_timeout")
        )
        self._decided |= decided
        self.warn(limits)
        args = self.build(arguments, **self._decided)
        launch_check.check_came_up(self.launch, args)
        self.warn(launch_check.use_one_gpu(args, self.planned(ModelArguments, "device_map")))
        set_seed(args.seed)
        return args
