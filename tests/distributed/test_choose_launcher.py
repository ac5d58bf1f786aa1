"""How many processes `indictune train` starts under a strategy file."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.distributed import choose_launcher


@pytest.mark.parametrize(
    ("content", "asked", "processes"),
    [
        ("distributed_type: 'NO'\nnum_processes: 8\n", None, 1),
        ("distributed_type: 'NO'\nnum_processes: 8\n", 2, 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", None, 4),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", 2, 2),
        ("- no mapping\n", None, 4),
    ],
)
def test_one_for_each_gpu_but_for_a_file_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, asked: int | None, processes: int
) -> None:
    monkeypatch.setattr(choose_launcher, "visible_gpus", lambda: 4)
    file = tmp_path / "theirs.yaml"
    file.write_text(content, encoding="utf-8")
    assert choose_launcher.choose_launcher(str(file), asked).processes == processes
    assert choose_launcher.choose_launcher("single_gpu", None).processes == 1
