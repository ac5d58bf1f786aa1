"""Evaluate a finished run's language model on a file of conversations."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoConfig

from indictune.config.arguments import ModelArguments
from indictune.config.chat_arguments import LlamaTrainingArguments
from indictune.config.command_arguments import EvaluateArguments
from indictune.data.bad_rows import go_on_with, keep_rejected
from indictune.data.chat_tokens import tokenise_chats, truncation_notes
from indictune.data.conversations import load_test_conversations
from indictune.data.templates import choose_template
from indictune.data.unusable_chats import quarantine_of
from indictune.distributed import sharding
from indictune.distributed.torch_compile import check_quantised
from indictune.models.adapter_base import config_file
from indictune.models.causal import load_trained_causal
from indictune.models.load import check_max_length, check_vocabulary, load_tokenizer, stored_quantisation
from indictune.models.load_errors import explained
from indictune.supervise.session import Session
from indictune.train.chat_trainer import LlamaTrainer, compute_dtype
from indictune.train.finish import evaluate_file


def evaluate_answers(session: Session) -> None:
    """Loss, perplexity and answer-token accuracy of a model on `--test_file`, in `metrics.json`. Ranks share the rows.

    Raises:
        UserError: all problems of the command and the file at once.
    """
    session.decide_evaluation(LlamaTrainingArguments)
    with session.checks():
        asked = session.build(EvaluateArguments)
        model_args = ModelArguments(model_name_or_path=asked.model, trust_remote_code=asked.trust_remote_code)
        with session.checks():
            with explained(model_args, Exception, flag="--model"):
                config = AutoConfig.from_pretrained(
                    config_file(asked.model), trust_remote_code=asked.trust_remote_code
                )
            session.warn(check_max_length(config, asked.max_length, begins=False))
            check_quantised(stored_quantisation(config))
        with session.checks():
            tokenizer = load_tokenizer(model_args, flag="--model")
            if asked.chat_template is not None:
                choose_template(tokenizer, asked.chat_template, False, asked.train_on_prompts)
        if asked.test_file:  # else that has been told
            rows, stored, notes = load_test_conversations(asked.test_file, asked, session.recipe.problems)
        template = choose_template(tokenizer, asked.chat_template, rows.as_written, asked.train_on_prompts)
    session.recipe.problems.raise_any()
    args = session.start_evaluation(LlamaTrainingArguments)
    with TemporaryDirectory() as folder:
        rejected = Path(folder)
        go_on_with(stored, rejected)
        quarantine = quarantine_of(rows, asked, rejected)
        tokens = tokenise_chats(rows, tokenizer, template, asked.max_length, asked.train_on_prompts, quarantine)
        session.warn([*notes, *tokens.notes, *truncation_notes(rows, tokens, asked.max_length)])
        keep_rejected(rejected, session.output_dir, session.rank)
    model = load_trained_causal(asked.model, compute_dtype(args), asked.trust_remote_code, asked.trust_checkpoint)
    check_vocabulary(model_args, model, tokenizer, flag="--model")
    trainer = LlamaTrainer(model, args, tokens.dataset, None, tokenizer)  # TRL asks for training rows
    sharding.prepare_for_evaluation(trainer)
    evaluate_file(trainer, session, tokens.dataset, asked.test_file)
