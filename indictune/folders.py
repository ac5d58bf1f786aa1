"""Where things are kept that later runs read again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Built-in models and prepared rows are kept here: `$INDICTUNE_CACHE`, or `~/.cache/indictune`."""
    return Path(os.environ.get("INDICTUNE_CACHE") or "~/.cache/indictune").expanduser()
