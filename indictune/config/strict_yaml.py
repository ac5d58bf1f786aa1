"""YAML as its author wrote it: YAML 1.1 takes 010 for 8, `no` for false, and of a key that stands twice the last."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import BaseConstructor, ConstructorError

_TAG = "tag:yaml.org,2002:"
_NOTHING = {f"{_TAG}null", f"{_TAG}merge"}
_NUMBERS = {f"{_TAG}bool", f"{_TAG}int", f"{_TAG}float"}


class _UniqueKeys(BaseConstructor):
    """Refuses a mapping with a key that stands twice, as the standard asks.

    Raises:
        ConstructorError: it names the key and its place.
    """

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class TextLoader(_UniqueKeys, yaml.BaseLoader):
    """Reads everything as text."""


class RecipeLoader(_UniqueKeys, yaml.SafeLoader):
    """Reads keys and values as text, for the type of a key's field to decide; nothing (`null`, `~`) stays nothing.

    A mapping that is a value, such as `{num_cycles: 2}`, has no fields: its numbers and truth values are read as such.
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
