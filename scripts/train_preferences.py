"""Teach a language model which of two answers is the better one (DPO).

python scripts/train_preferences.py --train_file pairs.jsonl --model_name_or_path MODEL --output_dir out

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_preferences.py --train_file pairs.jsonl --model_name_or_path MODEL --output_dir out

torchrun --nproc_per_node 8 scripts/train_preferences.py --deepspeed ds_configs/zero2.json --train_file ...
deepspeed --num_gpus 8 scripts/train_preferences.py --deepspeed ds_configs/zero3.json --train_file ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.preferences import Preference
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, Preference()), read_recipe(sys.argv[1:], Preference.arguments)))
