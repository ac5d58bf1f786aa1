"""Fine-tune a LLaMA model to follow instructions.

python scripts/train_llama.py --config recipes/llama/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2_qlora.yaml --num_processes 2 \
    scripts/train_llama.py --config recipes/llama/llama3_70b_qlora_fsdp2.yaml --train_file chats.jsonl --output_dir out

torchrun --nproc_per_node 8 scripts/train_llama.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_llama.py --deepspeed ds_configs/zero3_offload.json --config ...
"""

import os
import sys

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.supervise.execute import execute
from indictune.tasks.chat import Chat
from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.finish import finish, save_model
from indictune.training.samples import write_samples
from indictune.training.start import fit_batches, load_model, meet_nodes, run_training, start


def main(run: Run) -> None:
    """The table of contents of a run."""
    task = Chat()
    plan, problems = make_plan(run.recipe, os.environ, task)
    rows = read_rows(plan, task, problems + preflight(plan, task) + meet_nodes(plan))
    tokens = task.tokenise(plan, rows)
    padded = task.pads(plan)
    plan = fit_batches(plan, tokens, padded, run)
    plan, args, point = start(plan, run, tokens)
    run.warn(tokens.notes)
    run.show(f"\n{tokens.summary}\n")

    model = load_model(task, plan, args, rows)
    trainer = LlamaTrainer(model, args, tokens.train, tokens.validation, rows.tokenizer, padded, plan.launch)
    result = run_training(trainer, plan, run, point, tokens)
    saved_files = save_model(trainer, run)
    write_samples(trainer, run, tokens.samples)
    finish(trainer, run, result, tokens, saved_files)


if __name__ == "__main__":
    sys.exit(execute(main, read_recipe(sys.argv[1:], Chat.arguments())))
