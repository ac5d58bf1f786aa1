"""The bus bandwidth of collectives against the speed of the links, as data sheets and the kernel name it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from indictune.distributed.doctor.lines import Line
from indictune.distributed.planning.hardware import gpu_of_device, known_gpus, known_links

LOW = 0.4  # of the link's speed, with GPUs: a judgement. NCCL reaches 0.8 (nccl-tests, doc/PERFORMANCE.md)
_PORTS = Path("/sys/class/infiniband")
_SLOTS = ("pcie", "nvl")  # in the names of GPUs without NVLink to all others


def facts(gpu: str, interface: str) -> dict[str, float | str]:
    """What the links of this rank should carry, in bytes a second in one direction; 0 for unknown.

    Args:
        gpu: its name, as the driver gives it; empty without one.
        interface: the network interface that the user chose; empty for none.
    """
    name, rate = gpu_link(gpu)
    return {"gpu_link": name, "gpu_link_bytes_s": rate, "network_bytes_s": _network(interface)}


def gpu_link(gpu: str) -> tuple[str, float]:
    """The link between the GPUs of a node and its bytes a second; no name and 0 for an unknown GPU."""
    name = gpu_of_device(gpu)
    if name is None:
        return "", 0.0
    link = "pcie4" if any(word in gpu.lower() for word in _SLOTS) else str(known_gpus()[name]["link"])
    return link, known_links()[link]


def bandwidth_line(name: str, bus_bytes_s: float, links: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> Line:
    """How a collective's bus bandwidth compares with the slowest link that it crosses.

    Args:
        name: of the collective.
        bus_bytes_s: its bus bandwidth.
        links: `facts` of each rank.
        hosts: of the ranks.
    """
    several, has_gpus = len(set(hosts)) > 1, all(each["gpu_link_bytes_s"] for each in links)
    speeds = {str(links[0]["gpu_link"]): min(float(each["gpu_link_bytes_s"]) for each in links)} if has_gpus else {}
    if several:
        speeds["the network"] = min(float(each["network_bytes_s"]) for each in links)
    known = {link: speed for link, speed in speeds.items() if speed}
    found = f"right; bus bandwidth {bus_bytes_s / 1e9:.2f} GB/s"
    if not known:
        where = "between the nodes, whose speed is unknown" if several else "in the memory of one node"
        return Line(name, "ok", f"{found} {where}")
    link = min(known, key=known.__getitem__)
    found = f"{found}, {bus_bytes_s / known[link]:.0%} of {link} ({known[link] / 1e9:.0f} GB/s)"
    if not has_gpus or bus_bytes_s >= LOW * known[link]:
        return Line(name, "ok", found)
    cure = "NCCL_DEBUG=INFO names the transport that NCCL chose, nvidia-smi topo -m the links, ibstat the ports."
    return Line(name, "warn", found, cure)


def _network(interface: str) -> float:
    """Bytes a second of this node's InfiniBand ports, or else of its network interface; 0 for unknown."""
    gigabits = 0.0
    for rate in _PORTS.glob("*/ports/*/rate"):
        with suppress(OSError, ValueError):
            if "ACTIVE" in (rate.parent / "state").read_text(encoding="ascii"):
                gigabits += float(rate.read_text(encoding="ascii").split()[0])  # "400 Gb/sec (4X NDR)"
    up = {name: each.speed for name, each in psutil.net_if_stats().items() if each.isup and name != "lo"}
    megabits = up.get(interface, 0) if interface else max(up.values(), default=0)
    return 1e9 / 8 * gigabits or 1e6 / 8 * megabits
