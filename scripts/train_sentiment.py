"""Fine-tune a tweet sentiment classifier.

python scripts/train_sentiment.py --config recipes/sentiment/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_sentiment.py --config recipes/sentiment/indicbert_v2.yaml --train_file train.csv --output_dir out

torchrun --nproc_per_node 8 scripts/train_sentiment.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_sentiment.py --deepspeed ds_configs/zero3.json --config ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.classification import Classification
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, Classification()), read_recipe(sys.argv[1:], Classification.arguments)))
