"""GPUs, their links and the memory of a machine: by data sheets, by flags, or as this process sees them."""

from __future__ import annotations

import re
import resource
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import psutil

from indictune.config.shared_arguments import MachineArguments
from indictune.errors import Problems, UserError, problem

# Limit and use of this process's control group, version 2 and 1.
CONTROL_GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


def free_and_capacity() -> tuple[int, int]:
    """Bytes that are free and bytes that there are, by the tightest of machine, control group and `ulimit -v`."""
    machine = psutil.virtual_memory()
    found = [(machine.available, machine.total)]
    for limit, use in CONTROL_GROUPS:
        with suppress(OSError, ValueError):  # `max` is no number
            most = int(limit.read_text(encoding="ascii"))
            found.append((max(0, most - int(use.read_text(encoding="ascii"))), most))
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        found.append((max(0, most - psutil.Process().memory_info().vms), most))
    return min(found)


DEFAULT_GPU = "a100"  # whose rates count where no GPU is named
_BYTES = {"m": 1e6, "g": 1e9, "t": 1e12, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES_A_SECOND = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "mb": 1e6 / 8, "gb": 1e9 / 8, "MB": 1e6, "GB": 1e9}
# The PCIe of the GPUs that are sold with each faster link.
_PCIE_BESIDE = {"nvlink4": "pcie5", "nvlink3": "pcie4", "nvlink2": "pcie3"}
_PCIE_BESIDE |= dict.fromkeys(("nvlink5", "infinity_fabric"), "pcie5")


@cache
def _figures() -> dict[str, Any]:
    text = resources.files("indictune.planning").joinpath("hardware.toml").read_text(encoding="utf-8")
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
    """GPUs, and the links between them."""

    gpus: int  # in all nodes
    of_node: int  # GPUs of a node
    memory_bytes: float  # of a GPU
    flops: float  # of a GPU in 16 bits, without sparsity
    flops_fp32: float  # of a GPU in fp32, without tensor cores
    in_node: float  # bytes a second in one direction, of each GPU within a node
    between_nodes: float  # the same, to another node
    host_bytes: float = 0.0  # memory of a node; 0 for unknown
    has_bf16: bool = True  # whether a GPU computes in bf16

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
    """A machine of GPUs by their name in `known_gpus`, in nodes of equal size, with a link of `known_links`.

    None takes memory and link of the data sheet. `internode_bytes_s` are those of a node to the others, in one
    direction; None takes a port for each GPU. The memory of a node is 0 for unknown.
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


def machine_of_flags(args: MachineArguments) -> Machine:
    """The machine that the flags of `indictune plan` describe.

    Raises:
        UserError: all values that are none.
    """
    problems, gpus = Problems(), known_gpus()
    gpu = (args.gpu or DEFAULT_GPU).lower()
    memory = problems.attempt(_asked_size, "plan-memory", "--gpu_memory", args.gpu_memory)
    host = problems.attempt(_asked_size, "plan-memory", "--host_memory", args.host_memory)
    between = problems.attempt(_asked_size, "plan-internode", "--internode", args.internode)
    if gpu not in gpus:
        problems.append(problem("plan-unknown-gpu", "--gpu", gpu, known=", ".join(gpus)))
    link = problems.attempt(_asked_link, args.interconnect, gpu if gpu in gpus else DEFAULT_GPU)
    if args.gpus % args.nodes:
        problems.append(problem("plan-uneven-nodes", "--nodes", args.nodes, gpus=args.gpus))
    if args.internode is not None and args.nodes == 1:
        problems.append(problem("no-effect", "--internode", args.internode, "Give --nodes.", other="--nodes 1"))
    problems.raise_any()
    return machine_of(gpu, args.gpus, args.nodes, memory, link, between, host or 0.0)


def link_name(args: MachineArguments) -> str:
    """The name of the link between the GPUs of a node, such as `nvlink3`."""
    gpu = (args.gpu or DEFAULT_GPU).lower()
    return _asked_link(args.interconnect, gpu) or str(known_gpus()[gpu]["link"])


def this_machine(processes: int, gpus: int) -> Machine:
    """The machine of this process, with its CPU memory, which processes without GPUs share.

    A GPU that no data sheet is known of has the rates of an A100, and a process on a CPU those that are assumed.
    """
    free, capacity = free_and_capacity()
    if gpus:
        import torch  # slow, and `indictune train` reads this module before it starts a process

        gpu = gpu_of_device(torch.cuda.get_device_name(0)) or DEFAULT_GPU
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        return machine_of(gpu, processes, 1, memory, host_bytes=capacity)
    link, flops = 1e9 * assumed("cpu_link_gb_s"), 1e9 * assumed("cpu_gflops")
    return Machine(processes, processes, free / processes, flops, flops, link, link)


def _asked_size(code: str, flag: str, text: str | None) -> float | None:
    """Bytes, or bytes a second of a rate in bits or bytes: a number above 0 with a unit."""
    if text is None:
        return None
    is_rate = code == "plan-internode"
    units, plain = (_BYTES_A_SECOND, re.sub(r"(/s|ps|it|it/s)$", "", text)) if is_rate else (_BYTES, text.lower())
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", plain)
    size = float(found[1]) * units.get(found[2], 0.0) if found else 0.0
    if not size:
        raise UserError(code, flag, text)
    return size


def _asked_link(asked: str | None, gpu: str) -> str | None:
    """A name of `known_links`; `nvlink` and `pcie` are the generation of the GPU. None for the data sheet's."""
    own, known = str(known_gpus()[gpu]["link"]), known_links()
    if asked == "pcie":
        return _PCIE_BESIDE.get(own, own)
    if asked == "nvlink" and own.startswith(asked):
        return own
    if asked is None or asked in known:
        return asked
    raise UserError("plan-interconnect", "--interconnect", asked, gpu=gpu, link=own, known=", ".join(known))
