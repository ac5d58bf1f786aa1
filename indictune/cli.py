"""The `indictune` command: one thin verb a function, heavy imports inside the verb."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence

from indictune.config.verb_help import help_or_typos
from indictune.console_text import in_columns, printable
from indictune.errors import UserError
from indictune.versions import __version__

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_REFUSED = 2
USAGE = """usage: indictune VERB [flags]

verbs:
  train       train by a recipe, on the GPUs of this machine
              RECIPE.yaml | sentiment|llama|ner --train_file F
  recipes     list the recipes, strategy files and scripts, or copy some
              [NAME ...] [--to FOLDER]
  prepare     read and tokenise the rows of a run before it starts
              --config R.yaml [the run's flags]
  inspect     check rows and tokenizer, and show rows as the model sees them
              FILES [--show_mask N] [--json] [the run's flags]
  plan        rank the strategy files for a run by memory and time
              RECIPE.yaml | --model M [--task T] [--gpus N --gpu NAME]
  doctor      check this machine, its ranks and a recipe
              [RECIPE.yaml] [--json] [the run's flags]
  parity      compare a recipe's runs under strategy files with one process
              RECIPE.yaml --strategies A,B [--steps N] [the run's flags]
  evaluate    score a finished run's model on a file that is read as in training
              --model DIR --test_file F [--output_dir D] | --compare RUN_A RUN_B
              | --model DIR --lm_eval_tasks T
  report      write a run's report.html again, or compare runs on one page
              RUN [RUN ...] [--output_file F] [--texts false]
  predict     label texts
              FOLDER [--text T | --input_file F] [--output_file O]
  chat        talk to a language model in the terminal
              FOLDER [--temperature T] [--max_new_tokens N]
  serve       answer HTTP requests with a classifier
              FOLDER [--host H] [--port P]
  demo        try a model on a page, or write it as a Space
              FOLDER [--port P] [--export FOLDER]
  merge       make an adapter and its base one model
              ADAPTER --output_dir D [--dtype T]
  export      write a model for ONNX Runtime or llama.cpp
              DIR [--format onnx|gguf] [--output_dir D] [--int8 true]
  push        upload a finished model with its card to the Hub
              DIR REPO_ID [--private true] [--revision R] [--create_pr true]
  checkpoint  list and verify a run's checkpoints, or make one a plain model
              DIR [--convert_to FOLDER]

`indictune VERB --help` lists the flags of a verb.
`indictune --version` prints the version.
"""

# What other toolkits call a verb -> the one that does it here.
_MEANT = {
    **dict.fromkeys(("sft", "instruct", "instruction"), "train llama"),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "tune", "fit", "pt", "rlhf", "launch", "run"), "train"),
    **dict.fromkeys(("classify", "classification"), "train sentiment"),
    **dict.fromkeys(("eval", "score", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("server", "api", "deploy"), "serve"),
    **dict.fromkeys(("gradio", "space", "web", "ui"), "demo"),
    **dict.fromkeys(("infer", "inference", "label"), "predict"),
    **dict.fromkeys(("preprocess", "tokenize", "tokenise", "data"), "prepare"),
    **dict.fromkeys(("upload", "publish", "push_to_hub"), "push"),
    **dict.fromkeys(("merge_lora", "merge-lora"), "merge"),
    **dict.fromkeys(("onnx", "convert"), "export"),
    **dict.fromkeys(("gguf",), "export ... --format gguf"),
    **dict.fromkeys(("init", "new", "examples", "configs", "quickstart"), "recipes"),
    **dict.fromkeys(("resume",), "train ... --resume_from_checkpoint auto"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that `argv` begins with; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("--local_rank="):  # of DeepSpeed's launcher
        words = words[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if words else EXIT_REFUSED
    if words[0] in ("--version", "version"):
        print(f"indictune {__version__}")
        return 0
    try:
        if words[0] not in VERBS:
            meant = _MEANT.get(words[0], "")
            hint = f"Use `indictune {meant}`." if meant else None
            raise UserError("unknown-verb", value=words[0], way_out=hint, known=", ".join(VERBS))
        if text := help_or_typos(words[0], words[1:], USAGE):
            print(text, end="")
            code = 0
        else:
            code = VERBS[words[0]](words[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("indictune: interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED
    except UserError as error:
        return _refused(error, in_lines=words[0] == "plan")  # others quote commands to copy
    except OSError as error:  # that the verb did not explain
        file = f"{error.filename}: " if error.filename else ""
        return _refused(UserError("file-error", file, reason=error.strerror or error))


def train(argv: Sequence[str]) -> int:
    """Start a training run."""
    from indictune.train_command import train_command

    return train_command(argv)


def recipes(argv: Sequence[str]) -> int:
    """List or copy the files that come with the package."""
    from indictune.recipes_command import recipes_command

    return recipes_command(argv)


def prepare(argv: Sequence[str]) -> int:
    """Read and tokenise the rows of a run, once."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.supervise.logs import log_to_console
    from indictune.training.prepare import prepare_command

    log_to_console()
    return _until_stopped(prepare_command, argv)


def inspect(argv: Sequence[str]) -> int:
    """Check rows, and show some as the model sees them."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.supervise.logs import log_to_console
    from indictune.training.inspect_rows import inspect_command

    log_to_console()
    return _until_stopped(inspect_command, argv)


def plan(argv: Sequence[str]) -> int:
    """Rank the strategy files for a run."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.supervise.logs import log_to_console
    from indictune.training.plan_command import plan_command

    log_to_console()
    return _until_stopped(plan_command, argv)


def doctor(argv: Sequence[str]) -> int:
    """Check the machine, the ranks and a recipe."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.supervise.logs import log_to_console
    from indictune.training.doctor_command import doctor_command

    log_to_console()
    return _until_stopped(doctor_command, argv)


def parity(argv: Sequence[str]) -> int:
    """Compare runs under strategy files with one process."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.parity.command import parity_command

    return _until_stopped(parity_command, argv)


def evaluate(argv: Sequence[str]) -> int:
    """Score a finished run's model on a file, or compare two runs."""
    if any(word.partition("=")[0] == "--compare" for word in argv):
        from indictune.evaluation.comparison import compare_command

        return compare_command(argv)
    if any(word.partition("=")[0] == "--lm_eval_tasks" for word in argv):
        import indictune.before_imports
        from indictune.training.lm_eval_tasks import lm_eval_command

        return _until_stopped(lm_eval_command, argv)
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.supervise.execute import execute
    from indictune.training.evaluate import evaluation_of

    main, recipe = evaluation_of(argv)
    return execute(main, recipe, replaceable=("metrics.json",))


def report(argv: Sequence[str]) -> int:
    """Report on a run, or compare runs."""
    from indictune.report.command import report_command

    return _until_stopped(report_command, argv)


def predict(argv: Sequence[str]) -> int:
    """Label texts with a finished run's classifier."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.prediction.command import predict_command
    from indictune.supervise.logs import log_to_console

    log_to_console()
    return _until_stopped(predict_command, argv)


def chat(argv: Sequence[str]) -> int:
    """Talk to a language model."""
    from indictune.training.chat_terminal import chat_command

    return chat_command(argv)


def serve(argv: Sequence[str]) -> int:
    """Answer HTTP requests with a classifier."""
    from indictune.serving.command import serve_command
    from indictune.supervise.logs import log_to_console

    log_to_console()
    return serve_command(argv)


def demo(argv: Sequence[str]) -> int:
    """Show a model on a page."""
    from indictune.demo.command import demo_command
    from indictune.supervise.logs import log_to_console

    log_to_console()
    return demo_command(argv)


def merge(argv: Sequence[str]) -> int:
    """Make an adapter and its base one model."""
    from indictune.hub.made_models import merge_with_card

    return _until_stopped(merge_with_card, argv)


def export(argv: Sequence[str]) -> int:
    """Write a model for another runtime."""
    import indictune.before_imports  # noqa: F401, before everything slow
    from indictune.export.command import export_command
    from indictune.supervise.logs import log_to_console

    log_to_console()
    return _until_stopped(export_command, argv)


def push(argv: Sequence[str]) -> int:
    """Upload a finished model to the Hub."""
    from indictune.hub.push_command import push_command
    from indictune.supervise.logs import log_to_console

    log_to_console()
    return _until_stopped(push_command, argv)


def checkpoint(argv: Sequence[str]) -> int:
    """List and verify checkpoints, or make one a plain model."""
    from indictune.hub.made_models import checkpoint_with_card

    return _until_stopped(checkpoint_with_card, argv)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    each.__name__: each
    for each in (
        *(train, recipes, prepare, inspect, plan, doctor, parity, report),
        *(evaluate, predict, chat, serve, demo, merge, export, push, checkpoint),
    )
}


def _refused(error: UserError, in_lines: bool = False) -> int:
    from indictune.credentials import without_tokens  # slow

    text = printable(without_tokens(f"indictune: {error.message}"))
    print(in_columns(text) if in_lines else text, file=sys.stderr)
    return EXIT_REFUSED


def _until_stopped(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command that does not listen to signals itself. A stop signal ends it, and it cleans up."""
    from indictune.stop_signals import EXIT_RESUMABLE, Stopped, StopRequest, let_through

    try:
        with StopRequest().listening():
            let_through()
            return command(argv)
    except Stopped:
        print("indictune: stopped. Nothing is left half-written; the same command begins again.", file=sys.stderr)
        return EXIT_RESUMABLE
