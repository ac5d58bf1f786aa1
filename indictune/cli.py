"""The `indictune` command: help, typing errors, and the verb that does the rest."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from indictune.commands import VERBS, TypedFlags, Verb
from indictune.config.command_line import (
    SCRIPTS,
    STATUS_FILE,
    WORDS,
    early_problems,
    flags_of,
    help_of,
    read_command_line,
    read_flags,
    scripts_with,
    task_in,
    unknown_name,
)
from indictune.config.early_values import is_launched, name_problems, value_problems
from indictune.console_text import in_columns, printable
from indictune.credentials import without_tokens
from indictune.errors import Problem, Problems, UserError, linked, problem
from indictune.versions import __version__

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_REFUSED = 2
_INDENT = "\n" + " " * 14
_LINES = "\n".join(f"  {each.name:11} {_INDENT.join((each.does, *each.usage))}" for each in VERBS.values())
USAGE = f"""usage: indictune VERB [flags]

verbs:
{_LINES}

`indictune VERB --help` lists the flags of a verb.
`indictune --version` prints the version.
"""

# What other toolkits call a verb -> the one that does it here.
_MEANT = {
    **dict.fromkeys(("sft", "instruct", "instruction"), "train llama"),
    **dict.fromkeys(("finetune", "fine-tune", "fine_tune", "tune", "fit", "rlhf", "launch", "run"), "train"),
    **dict.fromkeys(("pt", "pretrain", "pretraining"), "train clm"),
    **dict.fromkeys(("classify", "classification"), "train sentiment"),
    **dict.fromkeys(("eval", "score", "test", "benchmark"), "evaluate"),
    **dict.fromkeys(("server", "api", "deploy"), "serve"),
    **dict.fromkeys(("gradio", "space", "web", "ui", "webui", "webchat"), "demo"),
    **dict.fromkeys(("infer", "inference", "label"), "predict"),
    **dict.fromkeys(("preprocess", "tokenize", "tokenise", "data"), "prepare"),
    **dict.fromkeys(("upload", "publish", "push_to_hub"), "push"),
    **dict.fromkeys(("merge_lora", "merge-lora"), "merge"),
    **dict.fromkeys(("onnx", "convert"), "export"),
    **dict.fromkeys(("gguf",), "export ... --format gguf"),
    **dict.fromkeys(
        ("quantize", "quantise", "quant"), "export ... --int8 true` or `indictune merge ... --to_4bit true"
    ),
    **dict.fromkeys(("init", "new", "examples", "configs", "quickstart"), "recipes"),
    **dict.fromkeys(("resume",), "train ... --resume_from_checkpoint auto"),
}

# (verb, flag) -> the flag of the verb: the finished model is --model everywhere, and was called otherwise by some.
_SPELLINGS = {
    ("merge", "adapter"): "model",
    ("push", "folder"): "model",
    ("checkpoint", "folder"): "model",
    ("report", "model"): "runs",
    ("plan", "model"): "model_name_or_path",
    ("inspect", "model"): "model_name_or_path",
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
        code = _run(words[0], read_flags(words[1:]))
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


def _run(name: str, flags: TypedFlags) -> int:
    """Print the help of a verb if the flags ask for it, or else run it; returns the exit code."""
    if name not in VERBS:
        meant = _MEANT.get(name, "")
        hint = f"Use `indictune {meant}`." if meant else None
        raise UserError("no-such-name", "indictune", name, way_out=hint, kind="command", known=", ".join(VERBS))
    verb = VERBS[name]
    bare = flags.get("", [])
    tasks = [WORDS.get(word, word) for word in bare if word in WORDS or word in SCRIPTS] if verb.takes_run else []
    flags = {_SPELLINGS.get((name, each), each): words for each, words in flags.items()}
    if "help" in flags:
        print(_help(verb, tasks, flags["help"]), end="")
        return 0
    _check_names(verb, tasks or list(SCRIPTS), flags)
    return verb.run(flags)


def _help(verb: Verb, tasks: Sequence[str], asked: Sequence[str]) -> str:
    """The help of a verb. A verb that takes the flags of a run shows its own first."""
    program = f"indictune {verb.name}"
    usage = f"usage: {program} {(_INDENT + ' ' * len(verb.name)).join(verb.usage)}\n\n{verb.does}\n"
    if not verb.takes_run:
        return help_of(program, usage, asked)
    return help_of(tasks[0] if tasks else next(iter(SCRIPTS)), usage, asked, flags_of(program).values())


def _check_names(verb: Verb, tasks: Sequence[str], flags: TypedFlags) -> None:
    """Refuse typing errors before anything slow is imported."""
    own = flags_of(f"indictune {verb.name}")
    known = [*own, "config"]
    if verb.takes_run:
        known += [name for task in tasks for name in flags_of(task)]
    problems = Problems(_unknown(verb, name, flags[name], known) for name in flags if name and name not in known)
    if verb.name in ("prepare", "inspect"):  # `train` reads the recipe itself, without the libraries of a run
        problems += early_problems(read_command_line(flags), tasks)
    problems.raise_any()
    if not is_launched():  # else the run reports them, from one rank
        Problems(_wrong_values(verb, tasks, flags)).raise_any()


_MODEL = ("config.json", "base_config.json")
_OF_A_RUN = ("train_log.jsonl", "status.json", "logs", "recipe.yaml")  # of which the verb says more
# A verb, the flag of its folders, and the problem of a folder that holds none of some files.
_FOLDERS = (
    *((verb, "model", "no-model", _MODEL + _OF_A_RUN) for verb in ("predict", "serve", "demo", "export")),
    *((verb, "model", "no-model", _MODEL) for verb in ("evaluate", "chat")),
    ("distil", "model", "no-model", _MODEL + _OF_A_RUN),
    ("checkpoint", "model", "no-checkpoints", (".",)),
    ("evaluate", "compare", "compare-needs-predictions", ("predictions.jsonl",)),
    ("merge", "model", "adapter-config-unreadable", ("adapter_config.json",)),
    ("push", "model", "nothing-to-push", _MODEL),
    ("report", "runs", "report-needs-run", ("metrics.json", "evaluation.json", "train_log.jsonl")),
)
_BARE = {"inspect": "train_file"} | {verb: flag for verb, flag, *_ in reversed(_FOLDERS)}


def _wrong_values(verb: Verb, tasks: Sequence[str], flags: TypedFlags) -> list[Problem]:
    """The problems of numbers, files and folders that are seen without the libraries of the verb."""
    bare, given = flags.get("", []), {name: words for name, words in flags.items() if name}
    repositories = given.get("repo_id", bare["model" not in given :]) if verb.name == "push" else []
    if verb.name == "evaluate" and bare[1:]:
        return []  # the verb says what the second word is
    if verb.name in _BARE and bare:
        given.setdefault(_BARE[verb.name], bare if verb.name in ("inspect", "report") else bare[:1])
    found = list[Problem]()
    for name, flag, code, files in _FOLDERS:
        shown = f"indictune {name}" if name in ("push", "report", "checkpoint") else f"--{flag}"
        for folder in given.get(flag, ()) if name == verb.name else ():
            if not any(os.path.exists(os.path.join(folder, file)) for file in files):
                missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                found.append(problem(code, shown, folder, missing=files[0], reason=repr(missing)))
    read = read_command_line(given)
    named = task_in(read.content)
    programs = [f"indictune {verb.name}", *([named] if named in SCRIPTS else tasks if verb.takes_run else [])]
    found += value_problems(read, programs)
    for name in repositories:
        found += name_problems(name, "indictune push", name, "Use a name such as you/name.")
    return found


def _unknown(verb: Verb, name: str, words: Sequence[str], known: Sequence[str]) -> Problem:
    if verb.name == "doctor" and name in flags_of("indictune train"):
        return problem("doctor-under-launcher", f"--{name}", " ".join(words))
    return unknown_name(name, "--", known, scripts_with(name) if verb.takes_run else ())


def _refused(error: UserError, in_lines: bool = False) -> int:
    """Report what was refused, to a caller from Python too; returns the exit code."""
    if STATUS_FILE in os.environ:
        from indictune.supervise.run_folder import write_status

        write_status(None, "user_error", without_tokens(error.message), error.problems)
    text = printable(without_tokens(f"indictune: {error.message}"))
    print(linked(in_columns(text) if in_lines else text, sys.stderr), file=sys.stderr)
    return EXIT_REFUSED
