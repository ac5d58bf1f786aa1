"""Access tokens in what the user gave: they belong in the environment, which is written to no file."""

from __future__ import annotations

import os
import re
from functools import cache

import yaml

# A token of the Hub: 34 characters after its prefix, or an OAuth or JWT token, which has other signs too. File names
# are seldom as long. The second line has keys of GitHub, OpenAI and Anthropic.
_TOKEN = re.compile(
    r"(?:hf|api_org)_[A-Za-z0-9]{30,}|hf_(?:oauth|jwt)_[\w.\-]{20,}"
    r"|gh[oprsu]_[A-Za-z0-9]{36}|github_pat_\w{22,}|\bsk-(?:(?:proj|ant)-[\w\-]{20,}|[A-Za-z0-9]{32,})"
)
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # the user's part of a URL (https://user:token@host)
# A signed URL of the Hub's storage opens a private file to everybody, for an hour.
_SIGNATURE = re.compile(
    r"(?<=[?&])([\w-]*(?:signature|credential|token|policy|passw(?:or)?d|pwd)=)[^&\s'\"]+", re.IGNORECASE
)
_SHORTEST = 16  # a shorter HF_TOKEN is a placeholder such as `none`, which occurs in ordinary words
FIELD = "hub_token"
# What PyYAML 6 raises for a text. Some values, such as 2026-13-45 or `!!bool x`, and deep brackets raise Python's own.
NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


def holds_token(text: str) -> bool:
    """Whether a text holds a token: one of the Hub's form, the user's own, or a URL with a login or a signature."""
    own = _own()
    return any(kind.search(text) for kind in (_TOKEN, _LOGIN, _SIGNATURE)) or (own is not None and own in text)


def without_tokens(text: str) -> str:
    """Replace tokens, logins and signatures in a text, for logs and consoles. Libraries repeat whole URLs."""
    for kind, shown in ((_LOGIN, "(a login)@"), (_SIGNATURE, r"\1(hidden)"), (_TOKEN, "(a token)")):
        text = kind.sub(shown, text)
    own = _own()
    return text if own is None else text.replace(own, "(a token)")


def _own() -> str | None:
    own = (os.environ.get("HF_TOKEN") or _logged_in() or "").strip()
    return own if len(own) >= _SHORTEST else None


@cache
def _logged_in() -> str | None:
    """The token of `hf auth login`, read once.

    huggingface_hub (2.4) reads files, may ask the network, and logs under a lock. No log line may wait for that.
    """
    from huggingface_hub import get_token  # slow

    try:
        return get_token()
    except Exception:  # an unreadable token is not sent either
        return None


def without_its_text(error: Exception) -> str:
    """What is wrong in a YAML text, and where, of an error of `NOT_YAML`.

    PyYAML's own message shows the line, which may hold a token.
    """
    if isinstance(error, yaml.reader.ReaderError):
        return f"{error.reason} (character {error.position + 1})"
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return "a value does not fit its form (a date, or the tag before it)"
    problem = "it holds a token" if holds_token(error.problem) else error.problem
    return f"{problem} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
