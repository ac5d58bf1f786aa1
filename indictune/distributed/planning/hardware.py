"""GPUs, and the links between them, by the figures of their data sheets."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@cache
def _figures() -> dict[str, Any]:
    text = resources.files("indictune.distributed.planning").joinpath("hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def known_gpus() -> dict[str, dict[str, Any]]:
    """Name -> `memory_gb`, `tflops`, `tflops_fp32`, `link`, and `bf16` where it is false."""
    return dict(_figures()["gpus"])


def gpu_of_device(device: str) -> str | None:
    """The longest known name in a device's, such as `l40s` in `NVIDIA L40S`; None if there is none."""
    name = re.sub(r"[^a-z0-9]", "", device.lower())
    return max((each for each in known_gpus() if each.replace("_", "") in name), key=len, default=None)


def known_links() -> dict[str, float]:
    """Name -> bytes a second in one direction; `nvlink` and `pcie` are those of the GPU."""
    return {name: 1e9 * rate for name, rate in _figures()["links"].items()}


def assumed(name: str) -> Any:
    """An assumption of `hardware.toml`."""
    return _figures()["assumed"][name]


@dataclass(frozen=True)
class Machine:
    """GPUs, and the links between them.

    Attributes:
        gpus: in all nodes.
        of_node: GPUs of a node.
        memory_bytes: of a GPU.
        flops: of a GPU in 16 bits, without sparsity.
        flops_fp32: of a GPU in fp32, without tensor cores.
        in_node: bytes a second in one direction, of each GPU within a node.
        between_nodes: the same, to another node.
        host_bytes: memory of a node; 0 for unknown.
        has_bf16: whether a GPU computes in bf16.
    """

    gpus: int
    of_node: int
    memory_bytes: float
    flops: float
    flops_fp32: float
    in_node: float
    between_nodes: float
    host_bytes: float = 0.0
    has_bf16: bool = True

    @property
    def usable_bytes(self) -> float:
        """Of a GPU, for what fits."""
        return float(assumed("of_memory") * self.memory_bytes)

    @property
    def nodes(self) -> int:
        """Of equally many GPUs."""
        return self.gpus // self.of_node

    def link(self, size: int, stride: int = 1) -> float:
        """Bytes a second of rings of `size` processes, of which each is the `stride`-th after the one before.

        A node's members of a ring add up their ways to the next node: NCCL makes as many rings as there are ports,
        each with a part of the bytes, and only one member of each ring sends to another node.
        """
        if size * stride <= self.of_node:
            return float(assumed("of_links") * self.in_node)
        members = max(1, self.of_node // stride)
        return float(assumed("of_links") * min(self.in_node, members * self.between_nodes))


def machine_of(
    gpu: str,
    gpus: int,
    nodes: int = 1,
    memory_bytes: float | None = None,
    interconnect: str | None = None,
    internode_bytes_s: float | None = None,
    host_bytes: float = 0.0,
) -> Machine:
    """A machine of known GPUs.

    Args:
        gpu: a name of `known_gpus`.
        gpus: in all nodes.
        nodes: of equal size.
        memory_bytes: of a GPU; None takes the data sheet's.
        interconnect: a name of `known_links`; None takes the data sheet's link.
        internode_bytes_s: of a node to the others, in one direction; None takes a port for each GPU.
        host_bytes: memory of a node; 0 for unknown.
    """
    figures, of_node = known_gpus()[gpu], gpus // nodes
    port = 1e9 / 8 * assumed("internode_gbit_s") if internode_bytes_s is None else internode_bytes_s / of_node
    return Machine(
        gpus,
        of_node,
        1e9 * figures["memory_gb"] if memory_bytes is None else memory_bytes,
        1e12 * figures["tflops"],
        1e12 * figures["tflops_fp32"],
        known_links()[interconnect or figures["link"]],
        port,
        host_bytes,
        figures.get("bf16", True),
    )
