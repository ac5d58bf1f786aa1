"""Fine-tune a tweet sentiment classifier.

python scripts/train_sentiment.py --config recipes/sentiment/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 \
    scripts/train_sentiment.py --config recipes/sentiment/indicbert_v2.yaml --train_file train.csv --output_dir out

torchrun --nproc_per_node 8 scripts/train_sentiment.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_sentiment.py --deepspeed ds_configs/zero3.json --config ...
"""

import sys
from functools import partial

import indictune.block_stop_signals  # noqa: F401, before all that is slow
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.data.collation import lengths_of
from indictune.data.load_rows import load_splits
from indictune.data.row_sources import sources_of
from indictune.data.tokenisation import tokenise_splits
from indictune.distributed.sharding import reading_weights
from indictune.distributed.vocabulary_choice import check_active_vocabulary, use_active_vocabulary
from indictune.models.classifier import check_classifier, label_order, load_classifier, load_classifier_config
from indictune.models.load import load_tokenizer
from indictune.models.unpadded import pads
from indictune.supervise.run import run
from indictune.supervise.session import Session
from indictune.train.callbacks.register import watch
from indictune.train.callbacks.resume import train
from indictune.train.class_weights import as_tensor, check_file, class_weights
from indictune.train.classifier_trainer import IndicTrainer, check_metric
from indictune.train.finish import finish, save_model
from indictune.train.loss import ExactLoss


def main(session: Session) -> None:
    """The table of contents of a run."""
    with session.checks():
        model_args = session.build(ModelArguments)
        config = load_classifier_config(model_args)
        session.check_model(model_args, config, session.planned(DataArguments, "max_length"), check_classifier)
    with session.checks():
        planned = partial(session.planned, SentimentTrainingArguments)
        check_active_vocabulary(planned("active_vocabulary"), model_args.method, str(planned("optim")), session.launch)
    with session.checks():
        padded = pads(planned("padding_free"), model_args, config)
    with session.checks():
        tokenizer = load_tokenizer(model_args)
    with session.checks():
        data_args = session.build(DataArguments)
        check_file(planned("class_weights"))
    session.decide(SentimentTrainingArguments)
    with session.checks():
        sources = sources_of(data_args, session.recipe.problems)
        session.check_evaluations(SentimentTrainingArguments, sources)
    with session.checks():
        splits = load_splits(data_args, session.recipe.problems, sources)
        weights = class_weights(planned("class_weights"), splits.train.each_label(), splits.labels)
        labels = label_order(config, splits.labels)
        check_metric(planned("metric_for_best_model"), splits.validation)
    session.recipe.problems.raise_any()

    session.warn(splits.notes)
    train_rows, validation, test = tokenise_splits(splits, tokenizer, labels, data_args.max_length)
    session.fit_batches(SentimentTrainingArguments, lengths_of(train_rows), splits.train.place, padded)
    args = session.start(SentimentTrainingArguments, has_validation=splits.validation is not None)
    with reading_weights(args):
        model = load_classifier(model_args, labels, tokenizer)
    use_active_vocabulary(model, args, (train_rows, validation, test), tokenizer, session.checkpoint)
    loss = ExactLoss(as_tensor(weights, labels), args.label_smoothing_factor)
    trainer = IndicTrainer(model, args, train_rows, validation, tokenizer, loss, padded)
    throughput = watch(trainer, splits.train.place, session)
    result = train(trainer, session, splits.folder, test)
    save_model(trainer, session)
    finish(trainer, session, result, throughput, test)


if __name__ == "__main__":
    sys.exit(run(main, read_recipe(sys.argv[1:], (ModelArguments, DataArguments, SentimentTrainingArguments))))
