"""Pretrain a causal language model further on raw text.

python scripts/train_clm.py --config recipes/text/clm_demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_clm.py --config recipes/text/clm_smollm2.yaml --train_file texts.txt --output_dir out

torchrun --nproc_per_node 8 scripts/train_clm.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_clm.py --deepspeed ds_configs/zero3.json --config ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.chat import CausalText
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, CausalText()), read_recipe(sys.argv[1:], CausalText.arguments)))
