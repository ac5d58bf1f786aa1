"""How many processes `indictune train` starts under a strategy file."""

from __future__ import annotations

from pathlib import Path

import pytest

from indictune.distributed import choose_launcher
from indictune.errors import UserError


@pytest.mark.parametrize(
    ("content", "asked", "processes"),
    [
        ("distributed_type: 'NO'\nnum_processes: 8\n", None, 1),
        ("distributed_type: 'NO'\nnum_processes: 8\n", 2, 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", None, 4),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", 2, 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", None, 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\ngpu_ids: 0,1\n", None, 2),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\ngpu_ids: 0,1,2\n", None, 3),
        ("distributed_type: MULTI_GPU\nnum_processes: 2\n", 3, 3),
        ("distributed_type: MULTI_GPU\n", None, 4),
    ],
)
def test_the_number_of_the_file_counts_where_there_are_gpus_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, asked: int | None, processes: int
) -> None:
    monkeypatch.setattr(choose_launcher, "visible_gpus", lambda: 4)
    file = tmp_path / "theirs.yaml"
    file.write_text(content, encoding="utf-8")
    assert choose_launcher.choose_launcher(str(file), asked).processes == processes
    assert choose_launcher.choose_launcher("single_gpu", None).processes == 1


def test_a_number_that_is_not_taken_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(choose_launcher, "visible_gpus", lambda: 4)
    file = tmp_path / "theirs.yaml"
    for asked, lines in ((8, 1), (3, 0)):
        file.write_text(f"distributed_type: MULTI_GPU\nnum_processes: {asked}\n", encoding="utf-8")
        choose_launcher.choose_launcher(str(file), None)
        assert len(capsys.readouterr().err.splitlines()) == lines
    choose_launcher.choose_launcher("ddp", None)
    assert capsys.readouterr().err == ""


def test_a_name_may_have_folder_and_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = choose_launcher.choose_launcher("fsdp2", 2)
    for name in ("fsdp2.yaml", "accelerate_configs/fsdp2", "accelerate_configs/fsdp2.yaml"):
        assert choose_launcher.choose_launcher(name, 2) == shipped
    for name in ("fsdp2.json", "mine/fsdp2.yaml", "accelerate_configs/fsdq.yaml"):
        with pytest.raises(UserError, match="no-such-strategy"):
            choose_launcher.choose_launcher(name, 2)
    Path("fsdp2.yaml").write_text("distributed_type: MULTI_GPU\n", encoding="utf-8")
    assert choose_launcher.choose_launcher("fsdp2.yaml", 2).config_file == Path("fsdp2.yaml")


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("- no mapping\n", [("recipe-not-a-mapping", "--strategy")]),
        ("a: [\n", [("not-yaml", "--strategy")]),
        ("num_processes: 2\n", [("strategy-file-refused", "--strategy")]),
        ("distributed_type: DPP\n", [("strategy-file-refused", "--strategy")]),
        (
            "distributed_type: MULTI_GPU\nmy_key: 1\nmixed_precision: fp8\n",
            [("unknown-name", "theirs.yaml: my_key"), ("launcher-sets", "theirs.yaml: mixed_precision")],
        ),
    ],
)
def test_a_file_that_accelerate_cannot_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, found: list[tuple[str, str]]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as refused:
        choose_launcher.choose_launcher("theirs.yaml", 2)
    assert [(each.code, each.flag) for each in refused.value.problems] == found
    assert "theirs.yaml" in refused.value.message


def test_the_stages_of_a_pipeline_reach_a_dry_run() -> None:
    assert choose_launcher.choose_launcher("pipeline", 4).environment()["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(
    ("strategy", "processes", "ranks"),
    [
        ("ddp", 4, 4),
        ("fsdp2", 4, 4),
        ("tp", 4, 1),
        ("ddp_tp", 4, 2),
        ("3d", 8, 2),
        ("zero1_tp", 4, 2),
        ("3d", 6, None),
    ],
)
def test_data_parallel_ranks_follow_from_the_file(strategy: str, processes: int, ranks: int | None) -> None:
    assert choose_launcher.choose_launcher(strategy, processes).data_ranks() == ranks
