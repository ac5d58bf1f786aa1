"""Fine-tune a tweet sentiment classifier.

python scripts/train_sentiment.py --config recipes/sentiment/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_sentiment.py --config recipes/sentiment/indicbert_v2.yaml --train_file train.csv --output_dir out

torchrun --nproc_per_node 8 scripts/train_sentiment.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_sentiment.py --deepspeed ds_configs/zero3.json --config ...
"""

import os
import sys

import indictune.before_imports  # noqa: F401, before everything slow
from indictune.config.recipe import read_recipe
from indictune.distributed.vocabulary_choice import use_active_vocabulary
from indictune.preflight.checks import preflight, read_rows
from indictune.preflight.derive import make_plan
from indictune.run import Run
from indictune.supervise.execute import execute
from indictune.tasks.classification import Classification
from indictune.training.exact_trainer import IndicTrainer
from indictune.training.finish import finish, save_model
from indictune.training.start import fit_batches, load_model, meet_nodes, run_training, start


def main(run: Run) -> None:
    """The table of contents of a run."""
    task = Classification()
    plan, problems = make_plan(run.recipe, os.environ, task)
    rows = read_rows(plan, task, problems + preflight(plan, task) + meet_nodes(plan))
    tokens = task.tokenise(plan, rows)
    padded = task.pads(plan)
    plan = fit_batches(plan, tokens, padded, run)
    plan, args, point = start(plan, run, tokens)
    run.warn(tokens.notes)

    model = load_model(task, plan, args, rows)
    use_active_vocabulary(model, args, tokens.datasets, rows.tokenizer, point.checkpoint)
    objective = task.objective(args, model.config, rows.tokenizer, padded, rows)
    trainer = IndicTrainer(
        model, args, tokens.train, tokens.validation, rows.tokenizer, objective, padded, plan.launch
    )
    result = run_training(trainer, plan, run, point, tokens)
    saved_files = save_model(trainer, run)
    finish(trainer, run, result, tokens, saved_files)


if __name__ == "__main__":
    sys.exit(execute(main, read_recipe(sys.argv[1:], Classification.arguments())))
