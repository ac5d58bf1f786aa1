"""The machine of a plan: what the flags say of it, or the one that this process runs on."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from indictune.config.shared_arguments import MachineArguments
from indictune.distributed.host_memory import free_and_capacity
from indictune.distributed.planning.hardware import (
    Machine,
    assumed,
    gpu_of_device,
    known_gpus,
    known_links,
    machine_of,
)
from indictune.errors import Problems, UserError, problem

DEFAULT_GPU = "a100"  # whose rates count where no GPU is named
_BYTES = {"m": 1e6, "g": 1e9, "t": 1e12, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_BYTES_A_SECOND = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "mb": 1e6 / 8, "gb": 1e9 / 8, "MB": 1e6, "GB": 1e9}
# The PCIe of the GPUs that are sold with each faster link.
_PCIE_BESIDE = {
    "nvlink5": "pcie5",
    "nvlink4": "pcie5",
    "nvlink3": "pcie4",
    "nvlink2": "pcie3",
    "infinity_fabric": "pcie5",
}


def asked_machine(args: MachineArguments) -> Machine:
    """The machine that the flags of `indictune plan` describe.

    Raises:
        UserError: all values that are none.
    """
    problems, gpus = Problems(), known_gpus()
    gpu = (args.gpu or DEFAULT_GPU).lower()
    memory = problems.attempt(_bytes, "--gpu_memory", args.gpu_memory)
    host = problems.attempt(_bytes, "--host_memory", args.host_memory)
    between = problems.attempt(_rate, args.internode)
    if gpu not in gpus:
        problems.append(problem("plan-unknown-gpu", "--gpu", gpu, known=", ".join(gpus)))
    link = problems.attempt(_link, args.interconnect, gpu if gpu in gpus else DEFAULT_GPU)
    if args.gpus % args.nodes:
        problems.append(problem("plan-uneven-nodes", "--nodes", args.nodes, gpus=args.gpus))
    if args.internode is not None and args.nodes == 1:
        problems.append(problem("no-effect", "--internode", args.internode, "Give --nodes.", other="--nodes 1"))
    problems.raise_any()
    return machine_of(gpu, args.gpus, args.nodes, memory, link, between, host or 0.0)


def link_name(args: MachineArguments) -> str:
    """The name of the link between the GPUs of a node, such as `nvlink3`."""
    gpu = (args.gpu or DEFAULT_GPU).lower()
    return _link(args.interconnect, gpu) or str(known_gpus()[gpu]["link"])


def this_machine(processes: int, gpus: int) -> Machine:
    """The machine of this process, with its CPU memory.

    A GPU that no data sheet is known of has the rates of an A100, and a process on a CPU those that are assumed.

    Args:
        processes: that a run starts.
        gpus: that it sees; 0 trains on the CPU, whose processes share its memory.
    """
    free, capacity = free_and_capacity()
    if gpus:
        gpu = gpu_of_device(torch.cuda.get_device_name(0)) or DEFAULT_GPU
        memory = float(torch.cuda.get_device_properties(0).total_memory)
        return machine_of(gpu, processes, 1, memory, host_bytes=capacity)
    link, flops = 1e9 * assumed("cpu_link_gb_s"), 1e9 * assumed("cpu_gflops")
    return Machine(processes, processes, free / processes, flops, flops, link, link)


def _bytes(flag: str, text: str | None) -> float | None:
    size = None if text is None else _amount(text.lower(), _BYTES)
    if text is not None and size is None:
        raise UserError("plan-memory", flag, text)
    return size


def _rate(text: str | None) -> float | None:
    """Bytes a second of a rate in bits or bytes."""
    rate = None if text is None else _amount(re.sub(r"(/s|ps|it|it/s)$", "", text), _BYTES_A_SECOND)
    if text is not None and rate is None:
        raise UserError("plan-internode", "--internode", text)
    return rate


def _amount(text: str, units: Mapping[str, float]) -> float | None:
    """A number above 0 with a unit; None for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text)
    if found is None or found[2] not in units:
        return None
    return float(found[1]) * units[found[2]] or None


def _link(asked: str | None, gpu: str) -> str | None:
    """A name of `known_links`; `nvlink` and `pcie` are the generation of the GPU. None for the data sheet's."""
    own, known = str(known_gpus()[gpu]["link"]), known_links()
    if asked == "pcie":
        return _PCIE_BESIDE.get(own, own)
    if asked == "nvlink" and own.startswith(asked):
        return own
    if asked is None or asked in known:
        return asked
    raise UserError("plan-interconnect", "--interconnect", asked, gpu=gpu, link=own, known=", ".join(known))
