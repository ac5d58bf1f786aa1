"""Whether a folder holds a language model, which talks, or another model."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from indictune.models.adapters import config_file, continues_texts


def talks(folder: Path) -> bool:
    """Whether the folder holds a language model. A folder without a model does not."""
    with suppress(OSError, ValueError, AttributeError):  # whoever reads the model reports these
        return continues_texts(json.loads(config_file(folder).read_text(encoding="utf-8")).get("architectures"))
    return False
