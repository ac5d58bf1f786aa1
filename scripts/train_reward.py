"""Teach a reward model which of two answers is the better one.

python scripts/train_reward.py --train_file pairs.jsonl --model_name_or_path MODEL --output_dir out

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_reward.py --train_file pairs.jsonl --model_name_or_path MODEL --output_dir out

torchrun --nproc_per_node 8 scripts/train_reward.py --deepspeed ds_configs/zero2.json --train_file ...
deepspeed --num_gpus 8 scripts/train_reward.py --deepspeed ds_configs/zero3.json --train_file ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.reward import RewardModel
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, RewardModel()), read_recipe(sys.argv[1:], RewardModel.arguments)))
