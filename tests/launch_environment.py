"""The environment that `accelerate launch` makes for a config file, by accelerate's own functions."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

RANK_1_OF_2 = {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def launched(file: str | Path, processes: int = 2) -> dict[str, str]:
    """The environment of a process that `accelerate launch --config_file FILE --num_processes N` starts."""
    flags = ["--config_file", str(file), "--num_processes", str(processes), "--main_process_port", "0", "script.py"]
    args: argparse.Namespace = launch_command_parser().parse_args(flags)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        args, defaults, has_precision = _validate_launch_command(args)
        if args.use_deepspeed:
            fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
            args.deepspeed_fields_from_accelerate_config = ",".join(fields)
            environ = prepare_deepspeed_cmd_env(args)[1]
        elif args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
            environ = prepare_multi_gpu_env(args)
        else:
            return dict(prepare_simple_launcher_cmd_env(args)[1])
    return {**environ, **RANK_1_OF_2}
