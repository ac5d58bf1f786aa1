"""Choose how `indictune train` starts a run, by strategy file, processes and launcher, and start it with accelerate.

python -m indictune.distributed.choose_launcher --config_file F --num_processes N SCRIPT [flags]
"""

from __future__ import annotations

import difflib
import logging
import os
import socket
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from indictune.config.command_line import load_recipe
from indictune.errors import Problems, UserError, missing_extra, problem
from indictune.versions import FOLDER, as_seen_from_here, strategies

_OLD_KEYS = ("fp16", "dynamo_backend")  # which accelerate (1.15) rewrites


def find_strategy(named: str) -> Path:
    """The installed file of that name, with or without its folder and ending, or the file of that path.

    Raises:
        UserError: `no-such-strategy`, or whatever keeps accelerate from reading the file.
    """
    known, path = strategies(), Path(named)
    if named in known:
        return known[named]
    if path.is_file():
        _check(path)
        return path
    is_name = path.suffix in ("", ".yaml", ".yml") and path.parent in (Path(), Path("accelerate_configs"))
    if not is_name or path.stem not in known:
        near = [each for each in known if each.startswith(named)] or difflib.get_close_matches(named, known, n=1)
        hint = f"Did you mean --strategy {near[0]}?" if near and named else None
        raise UserError("no-such-strategy", "--strategy", named, hint, known=", ".join(known))
    return known[path.stem]


def content_of(file: Path) -> Mapping[str, Any]:
    """The content of a strategy file.

    Raises:
        UserError: it cannot be read, or is no YAML mapping.
    """
    return load_recipe(file, "--strategy", yaml.SafeLoader, "Write lines such as `distributed_type: MULTI_GPU`.")


def _check(file: Path) -> None:
    from accelerate import __version__  # slow
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    content, problems = content_of(file), Problems()
    known = [*map(str, ClusterConfig.__dataclass_fields__), *_OLD_KEYS]
    for key in (str(key) for key in content if key not in known):
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        hint = f"Did you mean `{nearest[0]}`?" if nearest else "Remove it from the file."
        kind = f"key of accelerate {__version__}"
        problems.append(problem("unknown-name", f"{file}: {key}", way_out=hint, kind=kind))
    if str(content.get("mixed_precision")).lower() == "fp8":
        instead = "--bf16 true or --fp16 true"
        problems.append(problem("launcher-sets", f"{file}: mixed_precision", "fp8", instead=instead))
    problems.raise_any()
    try:
        load_config_from_file(str(file))
    except (ValueError, TypeError) as error:
        raise UserError("strategy-file-refused", "--strategy", file, reason=str(error).rstrip(".")) from error


_ONE_PROCESS, _SEVERAL = "single_gpu", "ddp"
_DEFAULT_PORT = 29500  # of accelerate
_MAY_SPLIT_THE_MODEL = {"parallelism_config", "megatron_lm_config", "deepspeed_config"}


@dataclass(frozen=True)
class Launcher:
    """A strategy file and the number of processes on this machine."""

    config_file: Path
    processes: int

    @property
    def machines(self) -> int:
        """Machines that the file asks for."""
        given = content_of(self.config_file).get("num_machines")
        return given if isinstance(given, int) else 1

    @property
    def is_one_process(self) -> bool:
        """Whether plain python does the same."""
        return self.config_file == strategies()[_ONE_PROCESS] and self.processes == 1

    def file_option(self) -> list[str]:
        """The words that name the file to accelerate."""
        file = self.config_file
        return ["--config_file", str(as_seen_from_here(file) if file.is_relative_to(FOLDER) else file)]

    def options_of_machines(self) -> list[str]:
        """Words of `accelerate launch` that the file leaves out, on each of several machines."""
        content, words = content_of(self.config_file), self.file_option()
        if content.get("num_processes") is None:
            words += ["--num_processes", str(self.machines * self.processes)]
        return words if content.get("main_process_ip") else [*words, "--main_process_ip", "HOST_OF_RANK_0"]

    def options(self) -> list[str]:
        """The words between `accelerate launch` and the script."""
        words = [*self.file_option(), "--num_processes", str(self.processes)]
        # Some strategy files name a DeepSpeed file, counted from the current folder.
        of_deepspeed = content_of(self.config_file).get("deepspeed_config")
        named = of_deepspeed.get("deepspeed_config_file") if isinstance(of_deepspeed, dict) else None
        if named is not None and not Path(named).is_file() and (FOLDER / named).is_file():
            words += ["--deepspeed_config_file", str(FOLDER / named)]
        with socket.socket() as probe:
            if self.processes > 1 and probe.connect_ex(("127.0.0.1", _DEFAULT_PORT)) == 0:
                words += ["--main_process_port", "0"]  # accelerate finds a free one
        return words

    def command(self, script: Path, flags: Sequence[str]) -> list[str]:
        """The command that starts the run. A `UserError` if accelerate lacks DeepSpeed for it."""
        if self.is_one_process:
            return [sys.executable, str(script), *flags]
        if content_of(self.config_file).get("distributed_type") == "DEEPSPEED":
            Problems(missing_extra("--strategy", self.config_file.stem, "train", "deepspeed")).raise_any()
        launch = [sys.executable, "-m", "indictune.distributed.choose_launcher"]
        return [*launch, *self.options(), str(script), *flags]

    def data_ranks(self) -> int | None:
        """Processes with different rows; None if their number is no product of the sizes in the file."""
        if not content_of(self.config_file).keys() & _MAY_SPLIT_THE_MODEL:
            return self.processes
        from indictune.distributed.launch import read_launch  # takes seconds

        try:
            return read_launch(self.environment()).data_size
        except UserError:
            return None

    def environment(self) -> Mapping[str, str]:
        """What the launcher would set for rank 0."""
        from accelerate.utils import launch  # slow

        from indictune.distributed.upstream import launch_values

        if self.is_one_process:
            return os.environ
        args, defaults, _ = launch_values(_parser().parse_args([*self.options(), "script.py"]))
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
            _, environ = launch.prepare_deepspeed_cmd_env(args)
        elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
            environ = launch.prepare_multi_gpu_env(args)
        else:
            _, environ = launch.prepare_simple_launcher_cmd_env(args)
            return dict(environ)
        processes = str(self.processes)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        return {**os.environ, **environ, **ranks}


@cache
def _parser() -> ArgumentParser:
    """That of `accelerate launch`, which takes tens of milliseconds to make."""
    from accelerate.commands.launch import launch_command_parser

    parser: ArgumentParser = launch_command_parser()
    return parser


def choose_launcher(strategy: str | None, processes: int | None) -> Launcher:
    """The launcher for this machine: one process for each GPU that it sees, or one on the CPU.

    The strategy is the name of a file in `accelerate_configs/`, or the path of another one.

    Raises:
        UserError: there is no such strategy, or accelerate could not read its file.
    """
    known = strategies()
    if strategy is None:
        count = processes or visible_gpus() or 1
        return Launcher(known[_ONE_PROCESS if count == 1 else _SEVERAL], count)
    file = find_strategy(strategy)
    return Launcher(file, processes or _default_processes(file))


def fitting_launcher(strategy: str, processes: int | None) -> Launcher:
    """The launcher of a strategy on several processes: without GPUs, the fewest of 2, 4 and 8 that its file can have.

    Arguments and errors are those of `choose_launcher`.
    """
    found = choose_launcher(strategy, processes)
    gives_number = processes is not None or visible_gpus() > 0
    if gives_number or content_of(found.config_file).get("distributed_type") == "NO":
        return found
    several = [Launcher(found.config_file, count) for count in (2, 4, 8)]
    return next((each for each in several if each.data_ranks()), several[0])


def _default_processes(file: Path) -> int:
    """The number that the file gives, if there are GPUs for it; else one for each GPU that the file leaves visible."""
    content = content_of(file)
    if content.get("distributed_type") == "NO" or content.get("num_machines", 1) != 1:  # several are refused
        return 1
    gpus, listed = visible_gpus(), str(content.get("gpu_ids") or "all")
    if listed != "all":
        gpus = min(gpus, len(listed.split(",")))
    asked = content.get("num_processes")
    if not isinstance(asked, int) or asked < 1:
        return gpus or 1
    if asked > max(gpus, 1):
        note = f"{file} asks for {asked} processes, and {gpus} GPU(s) are visible: {gpus or 1} start"
        print(f"indictune: {note}. --num_processes starts another number.", file=sys.stderr)
    return min(asked, gpus or 1)


def visible_gpus() -> int:
    """GPUs that torch sees. It is asked only where a driver is, because importing it takes seconds."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists() and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def launch_processes() -> int:
    """Run `accelerate launch` without its traceback when a rank fails: the rank has said why.

    Returns:
        The exit code: 1 if a rank failed.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(_parser().parse_args())
    except (ChildFailedError, subprocess.CalledProcessError):
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch_processes())
