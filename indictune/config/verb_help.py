"""The help of a verb, and typing errors in its flags, before anything slow is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence

from indictune.config.flag_table import LAUNCH_FLAGS, Flag, flags_of
from indictune.config.help import help_of
from indictune.config.read_words import early_problems, read_command_line, split_flags, unknown_name
from indictune.config.task_names import SCRIPTS, WORDS
from indictune.errors import Problem, Problems, problem

_TRAINS = ("train", "prepare", "inspect", "plan", "doctor", "parity")  # with the flags of a task


def help_or_typos(verb: str, words: Sequence[str], usage: str) -> str:
    """The help of a verb if `words` ask for it, else nothing.

    Args:
        verb: that was typed.
        words: after it.
        usage: of the command, with two lines for each verb: what it does, and what it takes.

    Raises:
        UserError: a flag that the verb does not have, or a key of its recipe.
    """
    flags = dict(split_flags(words))
    more: tuple[Flag, ...] = LAUNCH_FLAGS if verb == "train" else ()
    if verb in ("inspect", "plan", "doctor", "parity"):
        more = tuple(flags_of(f"indictune {verb}").values())
    tasks = [WORDS.get(word, word) for word in flags.pop("", []) if word in WORDS or word in SCRIPTS]
    if "help" in flags:
        task = tasks[0] if tasks else next(iter(SCRIPTS))
        lines = re.search(rf"^  {verb} +(.+)\n +(.+)$", usage, re.MULTILINE)
        assert lines is not None, verb
        title = f"usage: indictune {verb} {lines[2]}\n\n{lines[1]}\n"
        return help_of(task if verb in _TRAINS else f"indictune {verb}", title, flags["help"], more)
    programs = (tasks or list(SCRIPTS)) if verb in _TRAINS else [f"indictune {verb}"]
    known = [name for program in programs for name in flags_of(program)]
    if known:
        known += ["config", *(["model"] if verb == "plan" else []), *(each.name for each in more)]
        problems = Problems(_unknown(verb, name, flags[name], known) for name in flags if name not in known)
        if verb in ("prepare", "inspect"):  # `train` reads the recipe itself, without the libraries of a run
            problems += early_problems(read_command_line(words), programs)
        problems.raise_any()
    return ""


def _unknown(verb: str, name: str, words: Sequence[str], known: Sequence[str]) -> Problem:
    """The problem of a flag that a verb does not have."""
    if verb == "doctor" and name in {each.name for each in LAUNCH_FLAGS}:
        return problem("doctor-under-launcher", f"--{name}", " ".join(words))
    return unknown_name(name, "--", known)
