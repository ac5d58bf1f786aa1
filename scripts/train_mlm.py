"""Pretrain an encoder further on raw text: it guesses masked words.

python scripts/train_mlm.py --config recipes/text/mlm_demo.yaml

accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
    scripts/train_mlm.py --config recipes/text/mlm_e5.yaml --train_file texts.txt --output_dir out

torchrun --nproc_per_node 8 scripts/train_mlm.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_mlm.py --deepspeed ds_configs/zero3.json --config ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.raw_text import MaskedText
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, MaskedText()), read_recipe(sys.argv[1:], MaskedText.arguments)))
