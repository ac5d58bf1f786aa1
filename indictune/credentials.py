"""Access tokens in what the user gave. They belong into the environment, where no file has them."""

from __future__ import annotations

import os
import re
from functools import cache

import yaml
from huggingface_hub import get_token

# A token of the Hub (34 characters behind the first, or its OAuth and JWT ones, which have other signs too), whatever
# stands in front of it. A file's name is seldom as long.
_TOKEN = re.compile(r"(?:hf|api_org)_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_[\w.\-]{20,}")
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # the user's part of a URL (https://user:token@host)
# What stands in a URL of the Hub's storage opens a private file to everybody, for an hour.
_SIGNATURE = re.compile(r"(?<=[?&])([\w-]*(?:signature|credential|token|policy)=)[^&\s'\"]+", re.IGNORECASE)
# A shorter one is no secret but a placeholder (HF_TOKEN=none), and stands in words that are no token.
_SHORTEST = 16
FIELD = "hub_token"
WAY_OUT = (
    "a token in a command or a file can be read by others (process list, shell history, recipe.yaml). Leave it out, "
    "and set HF_TOKEN or type `hf auth login` once."
)
# What PyYAML 6 raises for a text; those that are not its own for a value, such as 2026-13-45 or `!!bool x`.
NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError)


def holds_token(text: str) -> bool:
    """Whether a text holds a token: one in the form of the Hub's, the one that is set here, or a URL with a login."""
    own = _own()
    return any(kind.search(text) for kind in (_TOKEN, _LOGIN)) or (own is not None and own in text)


def without_tokens(text: str) -> str:
    """A text as logs, a status and consoles get it: libraries repeat URLs, with the logins and signatures in them."""
    for kind, shown in ((_LOGIN, "(a login)@"), (_SIGNATURE, r"\1(hidden)"), (_TOKEN, "(a token)")):
        text = kind.sub(shown, text)
    own = _own()
    return text if own is None else text.replace(own, "(a token)")


def _own() -> str | None:
    """The token that is set here."""
    own = (os.environ.get("HF_TOKEN") or _logged_in() or "").strip()
    return own if len(own) >= _SHORTEST else None


@cache
def _logged_in() -> str | None:
    """The token of `hf auth login`, looked up once: huggingface_hub (2.4) reads files for it and may ask the network,
    under a lock under which it logs too, and no log line may wait for that, or fail by it."""
    try:
        return get_token()
    except Exception:  # whoever cannot tell the token does not send it either
        return None


def without_its_text(error: Exception) -> str:
    """What is wrong with a text of YAML, and where: PyYAML's own messages show the line, and a token may stand in it.

    Args:
        error: one of `NOT_YAML`.
    """
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return "a value does not fit its form (a date, or the tag in front of it)"
    problem = "a token stands there" if holds_token(error.problem) else error.problem
    return f"{problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
