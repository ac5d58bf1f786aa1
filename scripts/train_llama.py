"""Fine-tune a LLaMA model to follow instructions.

python scripts/train_llama.py --config recipes/llama/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2_qlora.yaml --num_processes 2 \
    scripts/train_llama.py --config recipes/llama/llama3_70b_qlora_fsdp2.yaml --train_file chats.jsonl --output_dir out

torchrun --nproc_per_node 8 scripts/train_llama.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_llama.py --deepspeed ds_configs/zero3_offload.json --config ...
"""

import sys
from functools import partial

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.supervise.execute import execute
from indictune.tasks.chat import Chat
from indictune.training.run_task import run_task

if __name__ == "__main__":
    sys.exit(execute(partial(run_task, Chat()), read_recipe(sys.argv[1:], Chat.arguments)))
