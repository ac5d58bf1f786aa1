"""Find the strategy file that `--strategy` names, and refuse one that accelerate could not read."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from indictune.credentials import NOT_YAML, without_its_text
from indictune.errors import Problem, Problems, UserError, problem
from indictune.shipped_files import strategies

_OLD_KEYS = ("fp16", "dynamo_backend")  # which accelerate (1.15) rewrites


def find_strategy(named: str) -> Path:
    """The installed file of that name, with or without its folder and ending, or the file of that path.

    Raises:
        UserError: `no-such-strategy`, or whatever keeps accelerate from reading the file.
    """
    known, path = strategies(), Path(named)
    if named in known:
        return known[named]
    if path.is_file():
        _check(path)
        return path
    is_name = path.suffix in ("", ".yaml", ".yml") and path.parent in (Path(), Path("accelerate_configs"))
    if not is_name or path.stem not in known:
        raise UserError("no-such-strategy", "--strategy", named, known=", ".join(known))
    return known[path.stem]


def content_of(file: Path) -> dict[str, Any]:
    """The content of a strategy file.

    Raises:
        UserError: it cannot be read, or is no YAML mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--strategy", file, reason=error) from error
    except NOT_YAML as error:
        raise UserError("not-yaml", "--strategy", file, reason=without_its_text(error)) from None
    if not isinstance(content, dict):
        hint = "Write lines such as `distributed_type: MULTI_GPU`."
        raise UserError("recipe-not-a-mapping", "--strategy", file, hint, found=type(content).__name__)
    return content


def _check(file: Path) -> None:
    content = content_of(file)
    problems = Problems(_unknown_keys(file, content))
    if str(content.get("mixed_precision")).lower() == "fp8":
        instead = "--bf16 true or --fp16 true"
        problems.append(problem("launcher-sets", f"{file}: mixed_precision", "fp8", instead=instead))
    problems.raise_any()
    from accelerate.commands.config.config_args import load_config_from_file  # slow

    try:
        load_config_from_file(str(file))
    except (ValueError, TypeError) as error:
        raise UserError("strategy-file-refused", "--strategy", file, reason=str(error).rstrip(".")) from error


def _unknown_keys(file: Path, content: dict[str, Any]) -> Iterator[Problem]:
    from accelerate import __version__  # slow
    from accelerate.commands.config.config_args import ClusterConfig

    known = [*map(str, ClusterConfig.__dataclass_fields__), *_OLD_KEYS]
    for key in (str(key) for key in content if key not in known):
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        hint = f"Did you mean `{nearest[0]}`?" if nearest else "Remove it from the file."
        yield problem("unknown-name", f"{file}: {key}", way_out=hint, kind=f"key of accelerate {__version__}")
