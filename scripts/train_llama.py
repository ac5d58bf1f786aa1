"""Fine-tune a LLaMA model to follow instructions.

python scripts/train_llama.py --config recipes/llama/demo.yaml

accelerate launch --config_file accelerate_configs/fsdp2_qlora.yaml --num_processes 2 \
    scripts/train_llama.py --config recipes/llama/llama3_70b_qlora_fsdp2.yaml --train_file chats.jsonl --output_dir out

torchrun --nproc_per_node 8 scripts/train_llama.py --deepspeed ds_configs/zero2.json --config ...
deepspeed --num_gpus 8 scripts/train_llama.py --deepspeed ds_configs/zero3_offload.json --config ...
"""

import sys
from functools import partial

import indictune.block_stop_signals  # noqa: F401, before all that is slow
from indictune.config.chat_arguments import ChatDataArguments, LlamaModelArguments, LlamaTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.data.chat_tokens import answer_ends
from indictune.data.collation import lengths_of
from indictune.data.conversations import load_conversations, sources_of
from indictune.data.prepare_chats import check_template, set_template, tokenise_splits
from indictune.distributed.sharding import reading_weights
from indictune.models.adapters import check_precision
from indictune.models.causal import check_causal, check_packing, load_causal, load_causal_config
from indictune.models.load import load_tokenizer
from indictune.models.unpadded import pads_causal
from indictune.supervise.run import run
from indictune.supervise.session import Session
from indictune.train.callbacks.register import watch
from indictune.train.callbacks.resume import train
from indictune.train.chat_trainer import LlamaTrainer, compute_dtype
from indictune.train.finish import finish, save_model
from indictune.train.samples import write_samples


def main(session: Session) -> None:
    """The table of contents of a run."""
    with session.checks():
        model_args = session.build(LlamaModelArguments)
        config = load_causal_config(model_args)
        session.check_model(model_args, config, session.planned(ChatDataArguments, "max_length"), check_causal)
        if session.planned(ChatDataArguments, "packing"):
            check_packing(model_args, config)
    with session.checks():
        data_args = session.build(ChatDataArguments)
        check_precision(model_args, partial(session.planned, LlamaTrainingArguments))
    session.decide(LlamaTrainingArguments)
    with session.checks():
        sources = sources_of(data_args, session.recipe.problems)
        session.check_evaluations(LlamaTrainingArguments, sources)
    with session.checks():
        tokenizer = load_tokenizer(model_args)
        check_template(tokenizer, data_args, sources)
    with session.checks():
        splits = load_conversations(data_args, session.recipe.problems, sources)
        template = set_template(tokenizer, splits, data_args)
    session.recipe.problems.raise_any()

    chats = tokenise_splits(splits, tokenizer, template, data_args)
    padded = not data_args.packing and pads_causal(model_args, config)
    session.fit_batches(LlamaTrainingArguments, lengths_of(chats.train), chats.place, padded)
    args = session.start(LlamaTrainingArguments, has_validation=splits.validation is not None)
    session.warn([*splits.notes, *chats.notes])
    session.show(f"\n{chats.summary}\n")
    with reading_weights(args) as reads:
        model = load_causal(model_args, tokenizer, compute_dtype(args), answer_ends(tokenizer, template), reads)

    trainer = LlamaTrainer(model, args, chats.train, chats.validation, tokenizer, padded)
    throughput = watch(trainer, chats.place, session)
    result = train(trainer, session, chats.folder, chats.test)
    save_model(trainer, session)
    write_samples(
        trainer, session, chats.samples, template, data_args.num_sample_generations, data_args.max_new_tokens
    )
    finish(trainer, session, result, throughput, chats.test)


if __name__ == "__main__":
    sys.exit(run(main, read_recipe(sys.argv[1:], (LlamaModelArguments, ChatDataArguments, LlamaTrainingArguments))))
