"""Evaluate a finished run's language model on a file of conversations."""

from __future__ import annotations

import os

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.data.bad_rows import keep_rejected
from indictune.data.conversations import load_test_conversations
from indictune.data.prepare_chats import tokenise_splits
from indictune.data.templates import choose_template
from indictune.distributed import sharding
from indictune.errors import Problems, problems_of
from indictune.models.adapter_base import config_file
from indictune.models.load import check_vocabulary, load_tokenizer
from indictune.models.load_errors import explained
from indictune.models.position_limits import check_max_length
from indictune.models.trained import load_trained
from indictune.preflight.checks import preflight_of_evaluation
from indictune.preflight.derive import make_evaluation_plan
from indictune.run import Run
from indictune.tasks.chat import compute_dtype
from indictune.train.chat_trainer import LlamaTrainer
from indictune.train.finish import evaluate_file
from indictune.train.start import bring_up


def evaluate_answers(run: Run) -> None:
    """Loss, perplexity and answer-token accuracy of a model on `--test_file`, in `metrics.json`. Ranks share the rows.

    Raises:
        UserError: all problems of the command and the file at once.
    """
    plan, found = make_evaluation_plan(run.recipe, os.environ, LlamaTrainingArguments, _read_config)
    problems, asked, config = Problems(found + preflight_of_evaluation(plan)), plan.data, plan.model_config
    tokenizer, test, template = None, None, None
    if config is not None:
        problems.extend(problems_of(check_max_length, config, asked.max_length, begins=False))
        tokenizer = problems.attempt(load_tokenizer, plan.model, flag="--model")
    if asked.test_file:  # else its absence is a problem already
        test = problems.attempt(load_test_conversations, asked.test_file, asked, problems)
    if tokenizer is not None and (asked.chat_template is not None or test is not None):
        as_written = test is not None and test.as_written
        template = problems.attempt(
            choose_template, tokenizer, asked.chat_template, as_written, asked.train_on_prompts
        )
    problems.raise_any()
    assert config is not None
    assert tokenizer is not None
    assert test is not None
    assert template is not None
    run.warn(check_max_length(config, asked.max_length, begins=False))
    plan, args = bring_up(plan, run)
    chats = tokenise_splits(test, tokenizer, template, asked)
    run.warn([*test.notes, *chats.notes])
    keep_rejected(chats.folder, run.output_dir, run.rank)
    rows = chats.datasets["test"]
    trusts = asked.trust_remote_code, asked.trust_checkpoint
    model = load_trained(asked.model, *trusts, kind=AutoModelForCausalLM, dtype=compute_dtype(args))
    check_vocabulary(plan.model, model, tokenizer, flag="--model")
    trainer = LlamaTrainer(model, args, rows, None, tokenizer)  # TRL asks for training rows
    trainer.strategy = plan.launch.strategy
    sharding.prepare_for_evaluation(trainer)
    evaluate_file(trainer, run, rows, asked.test_file)


def _read_config(args: ModelArguments) -> PreTrainedConfig:
    """The configuration of a trained language model, or of an adapter's base.

    Raises:
        UserError: it cannot be read.
    """
    with explained(args, Exception, flag="--model"):
        file = config_file(args.model_name_or_path)
        config: PreTrainedConfig = AutoConfig.from_pretrained(file, trust_remote_code=args.trust_remote_code)
    return config
