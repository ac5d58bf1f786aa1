"""The verbs of the `indictune` command: `commands/<verb>.py` holds the flags and the run of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

TypedFlags = dict[str, list[str]]  # the words of each flag; bare words in front of the flags are those of ""


class Verb(NamedTuple):
    """A verb of the command.

    Its file here has `run_<name>`, which takes the flags and returns an exit code, or raises a `UserError` with all
    problems of the flags, the files and the machine.
    """

    name: str
    does: str
    usage: tuple[str, ...]  # lines of what it takes
    takes_run: bool = False  # the flags of a training run, besides its own
    logs: bool = False  # shows warnings of the package on the console
    listens: bool = False  # handles stop signals itself

    def run(self, flags: TypedFlags) -> int:
        """Run the verb; returns the exit code."""
        if not self.listens:
            import indictune.before_imports  # noqa: F401, before everything slow
        if self.logs:
            from indictune.supervise.run_folder import log_to_console

            log_to_console()
        function: Callable[[TypedFlags], int] = getattr(import_module(f"{__name__}.{self.name}"), f"run_{self.name}")
        return function(flags) if self.listens else until_stopped(lambda: function(flags))


def until_stopped(command: Callable[[], int]) -> int:
    """Run a command that does not listen to signals itself. A stop signal ends it, and it cleans up."""
    from indictune.stop_signals import EXIT_RESUMABLE, Stopped, StopRequest, unblock_stop_signals

    try:
        with StopRequest().listening():
            unblock_stop_signals()
            return command()
    except Stopped:
        print("indictune: stopped. Nothing is left half-written; the same command begins again.", file=sys.stderr)
        return EXIT_RESUMABLE


_ALL = (
    Verb("train", "train by a recipe, on the GPUs of this machine or of a Ray cluster",
         ("RECIPE.yaml | sentiment|llama|ner|mlm|clm --train_file F",), takes_run=True, listens=True),
    Verb("recipes", "list or copy recipes, strategy files, scripts; fetch an encoder",
         ("[NAME ...] [--to FOLDER] | --weights",), listens=True),
    Verb("prepare", "read and tokenise the rows of a run before it starts",
         ("--config R.yaml [the run's flags]",), takes_run=True, logs=True),
    Verb("inspect", "check rows and tokenizer, and show rows as the model sees them",
         ("FILES [--show_mask N] [--json] [the run's flags]",), takes_run=True, logs=True),
    Verb("plan", "rank the strategy files for a run by memory and time",
         ("RECIPE.yaml | --model M [--task T] [--gpus N --gpu NAME]",), takes_run=True, logs=True),
    Verb("doctor", "check this machine, its ranks and a recipe",
         ("[RECIPE.yaml] [--json] [the run's flags]",), takes_run=True, logs=True),
    Verb("parity", "compare a recipe's runs under strategy files with one process",
         ("RECIPE.yaml --strategies A,B [--steps N] [the run's flags]",), takes_run=True),
    Verb("sweep", "try settings of a run by seeds, folds, grids or searches",
         ("RECIPE.yaml | TASK --train_file F [--seeds N] [--folds K]",
          "[--grid NAME=a,b ... | --search NAME=LOW..HIGH ... --trials N]"), takes_run=True),
    Verb("distil", "make a classifier small: fewer layers, and the vocabulary in use",
         ("RUN --train_file TEXTS --output_dir D [--layers N]", "[the run's flags]"),
         takes_run=True, logs=True, listens=True),
    Verb("evaluate", "score a finished run's model on a file that is read as in training",
         ("FOLDER --test_file F [--output_dir D] | --compare RUN_A RUN_B", "| FOLDER --lm_eval_tasks T"),
         listens=True),
    Verb("report", "write a run's report.html again, or compare runs on one page",
         ("RUN [RUN ...] [--output_file F] [--texts false]",)),
    Verb("predict", "label texts", ("FOLDER [--text T | --input_file F] [--output_file O]",), logs=True),
    Verb("chat", "talk to a language model in the terminal",
         ("FOLDER [--temperature T] [--max_new_tokens N]",), listens=True),
    Verb("serve", "label texts over HTTP", ("FOLDER [--host H] [--port P]",), logs=True, listens=True),
    Verb("demo", "try a model on a page, or write it as a Space",
         ("FOLDER [--port P] [--export FOLDER]",), logs=True, listens=True),
    Verb("vocabulary", "give a model tokens for scripts that it splits badly",
         ("extend MODEL --train_file F --tokens N --output_dir D",), logs=True),
    Verb("merge", "make an adapter and its base one model", ("FOLDER --output_dir D [--dtype T]",), logs=True),
    Verb("export", "write a model for ONNX Runtime or llama.cpp",
         ("FOLDER [--format onnx|gguf] [--output_dir D] [--int8 true]",), logs=True),
    Verb("push", "upload a finished model with its card to the Hub",
         ("FOLDER REPO_ID [--private true] [--revision R] [--create_pr true]",), logs=True),
    Verb("checkpoint", "list and verify a run's checkpoints, or make one a plain model",
         ("FOLDER [--convert_to FOLDER]",)),
    Verb("explain", "say what an error code means, and the way out", ("CODE",), listens=True),
)  # fmt: skip
VERBS = {verb.name: verb for verb in _ALL}
