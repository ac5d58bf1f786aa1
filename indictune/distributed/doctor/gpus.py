"""The visible GPUs against the processes of the launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from indictune.distributed.doctor.lines import Line, named

CHECK = "GPUs"


def facts(local_rank: int) -> dict[str, Any]:
    """What this process sees: `visible`, the `name` and `uuid` of its own GPU, and a `driver` without GPUs.

    Each process of a node takes the GPU with its own number.
    """
    visible = torch.cuda.device_count()
    own = torch.cuda.get_device_properties(local_rank) if local_rank < visible else None
    return {
        "visible": visible,
        "name": own.name if own else "",
        "uuid": str(own.uuid) if own else "",
        "driver": any(Path("/dev").glob("nvidia[0-9]*")) and visible == 0,
        "cuda": torch.version.cuda or "",
    }


def gpu_lines(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Line]:
    """What is wrong with the GPUs of the ranks, or one line that is ok.

    Args:
        by_rank: `facts` of each rank.
        hosts: of the ranks.
    """
    on_host = Counter(hosts)
    found = [*_without_driver(by_rank, hosts), *_shared(by_rank, hosts), *_unlike(by_rank, hosts)]
    for host, processes in on_host.items():
        first = hosts.index(host)
        visible = by_rank[first]["visible"]
        if 0 < visible < processes:
            cure = f"Use --num_processes {visible} a node, or show more GPUs with CUDA_VISIBLE_DEVICES."
            found.append(Line(CHECK, "fail", f"{processes} processes on {host}, and {visible} visible GPU(s)", cure))
        elif visible > processes:
            unused = (
                f"{visible} visible GPUs on {host}, and {processes} process(es): {visible - processes} stay unused"
            )
            cure = f"accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {visible} ..."
            found.append(Line(CHECK, "warn", unused, f"To use and check them all: {cure}"))
    names = Counter(each["name"] or "CPU" for each in by_rank)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    return found or [Line(CHECK, "ok", f"{len(by_rank)} process(es) on {len(on_host)} node(s): {shown}")]


def _without_driver(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Line]:
    blind = [rank for rank, each in enumerate(by_rank) if each["driver"]]
    if not blind:
        return []
    if not by_rank[blind[0]]["cuda"]:
        return [
            Line(CHECK, "fail", f"{named(blind, hosts)}: this torch is built for the CPU", "Install a CUDA build.")
        ]
    cure = "Check nvidia-smi and CUDA_VISIBLE_DEVICES. The driver must be as new as the CUDA of torch "
    found = f"{named(blind, hosts)}: there is an NVIDIA GPU, and torch sees none"
    return [Line(CHECK, "fail", found, f"{cure}({by_rank[blind[0]]['cuda']}).")]


def _shared(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Line]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(by_rank):
        if each["uuid"]:
            users.setdefault((hosts[rank], each["uuid"]), []).append(rank)
    cure = "Give each process its own GPU: check CUDA_VISIBLE_DEVICES."
    return [
        Line(CHECK, "fail", f"{named(who, hosts)} have the same GPU", cure) for who in users.values() if len(who) > 1
    ]


def _unlike(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Line]:
    usual, count = Counter(each["name"] for each in by_rank).most_common(1)[0]
    others = [rank for rank, each in enumerate(by_rank) if each["name"] != usual]
    if count == len(by_rank):
        return []
    found = f"{named(others, hosts)}: {by_rank[others[0]]['name'] or 'CPU'}; the others have {usual or 'CPU'}"
    return [Line(CHECK, "warn", found, "The slowest GPU sets the pace. Use nodes of one kind.")]
