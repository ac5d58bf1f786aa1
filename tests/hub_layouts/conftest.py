"""A Hub with repositories in published layouts, which runs ask by `HF_ENDPOINT`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.hub import Hub, hub
from tests.hub_layouts.encoders import indicbert_v2
from tests.hub_layouts.models import DECODERS, ENCODERS, GATED, RENAMED
from tests.ranks.launching import python, start

TOKEN = "hf_LetInLetInLetInLetInLetInLetIn1234"


@dataclass(frozen=True)
class Place:
    """Where commands run: a Hub, and a cache of what it gave.

    Attributes:
        folder: for what they read and write.
        commits: the commit of `main` of each repository, by name.
    """

    hub: Hub
    folder: Path
    commits: dict[str, str]

    def run(
        self, *words: str, online: bool = True, token: str | None = TOKEN, anew: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """A script of this repository and its flags, or a verb of `indictune` and its flags.

        Python starts `anew` where `datasets` asks the Hub: it reads HF_ENDPOINT once, when it is imported.
        """
        command = words if words[0].endswith(".py") else ("indictune/__main__.py", *words)
        environment = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.folder / "cache")}
        environment |= {"HF_HUB_OFFLINE": "0" if online else "1"} | ({} if token is None else {"HF_TOKEN": token})
        return start([*python(), *command], environment, anew=anew)

    def rows(self, name: str, rows: list[dict[str, object]]) -> str:
        """The path of a file with these rows."""
        path = self.folder / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The Hub, with all models of `models.py`."""
    with hub() as kept:
        commits = {}
        for name, files in {**ENCODERS, **DECODERS}.items():
            repository = kept.shelf.add(name, files(), gated=name in GATED)
            commits[name] = repository.refs["main"]
            if name == "ai4bharat/IndicBERTv2-MLM-only":
                repository.commit(indicbert_v2()[1], "refs/pr/1")
        for old, new in RENAMED.items():
            kept.shelf.add(old, {}, moved_to=new)
        kept.shelf.let_in.add(f"Bearer {TOKEN}")
        yield Place(kept, tmp_path_factory.mktemp("place"), commits)
