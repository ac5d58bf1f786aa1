"""Access tokens in what the user typed. They belong into the environment, where no file has them."""

from __future__ import annotations

import re

from huggingface_hub import get_token

# A token of the Hub, and the user's part of a URL (https://user:token@host).
_LOOKS_LIKE_ONE = re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}|://[^/?#\s]*@")
FIELD = "hub_token"
WAY_OUT = (
    "a token in a command or a file can be read by others (process list, shell history, recipe.yaml). Leave it out, "
    "and set HF_TOKEN or type `hf auth login` once."
)


def holds_token(text: str) -> bool:
    """Whether a text holds a token: one in the form of the Hub's, the one that is set here, or a URL with a login."""
    own = get_token()
    return _LOOKS_LIKE_ONE.search(text) is not None or (own is not None and own in text)
