"""YAML as its author wrote it. YAML 1.1 reads 010 as 8, `no` as false, and keeps the last of two equal keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import BaseConstructor, ConstructorError

from indictune.credentials import NOT_YAML, without_its_text
from indictune.errors import UserError

_TAG = "tag:yaml.org,2002:"
_NOTHING = {f"{_TAG}null", f"{_TAG}merge"}
_NUMBERS = {f"{_TAG}bool", f"{_TAG}int", f"{_TAG}float"}


class _UniqueKeys(BaseConstructor):
    """Raises a `ConstructorError` with the place of a key that a mapping has twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value} is there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class TextLoader(_UniqueKeys, yaml.BaseLoader):
    """Reads everything as text."""


class RecipeLoader(_UniqueKeys, yaml.SafeLoader):
    """Reads keys and values as text, which the type of the field converts; `null` and `~` stay None.

    In a mapping that is a value, such as `{num_cycles: 2}`, numbers and booleans are read as such: it has no fields.
    """

    depth = 0

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        self.depth += 1
        node = super().compose_mapping_node(anchor)
        self.depth -= 1
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        known = _NOTHING if self.depth == 1 else _NOTHING | _NUMBERS
        return f"{_TAG}str" if kind is yaml.ScalarNode and tag not in known else tag


def load_recipe(path: Path) -> Mapping[str, Any]:
    """The content of a recipe file.

    Raises:
        UserError: it cannot be read, or is no mapping.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), RecipeLoader)
    except FileNotFoundError:
        raise UserError("no-such-file", "--config", path) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("unreadable", "--config", path, reason=error) from error
    except NOT_YAML as error:
        raise UserError("not-yaml", "--config", path, reason=without_its_text(error)) from None
    if not isinstance(content, Mapping):
        raise UserError("recipe-not-a-mapping", "--config", path, found=type(content).__name__)
    return content
