"""What one machine has: its packages, compiler, GPUs and shared memory, and whether bitsandbytes quantises right."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from indictune.config.plan import Launch
from indictune.distributed.zero import needs_cpu_adam
from indictune.doctor.check_lines import Outcome, Status, named_ranks
from indictune.planning.machine_failures import SHARED_MEMORY
from indictune.upstream import versions_of
from indictune.versions import __version__

PACKAGES_CHECK = "packages"

_SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes")
_CPU_ADAM = "CPU Adam"
_FOUR_BIT = "bitsandbytes"
# Mean absolute error on a normal distribution: of the 16 values of NF4 (QLoRA, appendix E), with blocks of 64.
KNOWN_ERROR = 0.0728
_SIDE = 256
_TOLERANCE = 0.03  # of the error: that of 65,536 samples
_GPUS = "GPUs"
# Docker gives 64 MB, and NCCL takes some for each pair of ranks.
_SMALL_SHARED_BYTES, _LEAST_SHARED_BYTES = 1 << 30, 16 << 20
_MORE_SHARED_MEMORY = "docker run --shm-size 8g, or --ipc=host. Without it: --dataloader_num_workers 0."


def package_lines(environ: Mapping[str, str], gpus: int, processes: int) -> list[Outcome]:
    """What is wrong with the packages of this process, which sees some GPUs, or one line that is ok."""
    installed = [each for each in requirements("train") if versions_of([each.name])]
    found = [line for each in dict.fromkeys(requirements() + installed) if (line := _line_of(each))]
    for fault in known_faults():
        asked = (not fault.get("gpu") or gpus > 0) and (not fault.get("several") or processes > 1)
        if asked and _matches(fault, environ):
            found.append(Outcome(PACKAGES_CHECK, "warn", fault["found"], fault["cure"]))
    shown = ", ".join(f"{name} {number}" for name, number in versions_of(_SHOWN).items())
    ok = Outcome(PACKAGES_CHECK, "ok", f"indictune {__version__}, python {platform.python_version()}, {shown}")
    return found or [ok]


def requirements(extra: str = "") -> list[Requirement]:
    """The packages that indictune needs on this platform, those of an extra included, with their versions.

    From its metadata; a checkout that is not installed has them in `pyproject.toml`.
    """
    try:
        lines = requires("indictune") or []
    except PackageNotFoundError:
        root = Path(str(resources.files("indictune"))).parent
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = project["dependencies"] + project["optional-dependencies"].get(extra, [])
    found = map(Requirement, lines)
    return [each for each in found if each.marker is None or each.marker.evaluate({"extra": extra})]


def extras_line() -> Outcome:
    """The extras of `indictune[all]` that are not installed. A run that needs one is refused, so nothing is wrong."""
    of_all = sorted(name for each in requirements("all") if each.name == "indictune" for name in each.extras)
    missing = {name: [each.name for each in requirements(name) if not versions_of([each.name])] for name in of_all}
    shown = [f"{name} ({', '.join(packages)})" for name, packages in missing.items() if packages]
    return Outcome("extras", "ok", f"not installed: {', '.join(shown)}" if shown else "all are installed")


@cache
def known_faults() -> list[dict[str, Any]]:
    """The entries of `known_faults.toml`."""
    text = resources.files("indictune.doctor").joinpath("known_faults.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["fault"])


def _line_of(needed: Requirement) -> Outcome | None:
    cure = f'pip install "{needed.name}{needed.specifier}"'
    try:
        installed = version(needed.name)
    except PackageNotFoundError:
        return Outcome(PACKAGES_CHECK, "fail", f"{needed.name} is not installed", cure)
    if needed.specifier.contains(installed, prereleases=True):
        return None
    text = f"{needed.name} {installed} is not tested: expected {needed.specifier}"
    return Outcome(PACKAGES_CHECK, "warn", text, cure)


def _matches(fault: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    installed = versions_of(fault["packages"])
    has_packages = all(
        name in installed and SpecifierSet(asked).contains(installed[name], prereleases=True)
        for name, asked in fault["packages"].items()
    )
    given = ((environ.get(name, ""), asked) for name, asked in fault["variables"].items())
    return has_packages and all(value if asked == "*" else value == asked for value, asked in given)


def build_line(launch: Launch) -> Outcome:
    """Whether CPU Adam can be built on this node. Only DeepSpeed with an offloaded optimizer needs it."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    missing = _missing_for_build(compiler)
    if not missing:
        builders = f"{shutil.which(compiler)} and {shutil.which('ninja')}"
        return Outcome(_CPU_ADAM, "ok", f"{builders} build it in 1 to 2 minutes")
    found, cure = f"cannot be built without {', '.join(missing)}", " ".join(missing.values())
    if needs_cpu_adam(launch):
        return Outcome(_CPU_ADAM, "fail", f"{found}, and {launch.strategy} needs it", cure)
    return Outcome(_CPU_ADAM, "ok", f"{found}; only an offloaded optimizer under DeepSpeed needs it")


def _missing_for_build(compiler: str) -> dict[str, str]:
    found = {}
    if shutil.which(compiler) is None:
        found["a C++ compiler"] = "apt-get install g++, or set CXX."
    if shutil.which("ninja") is None:
        found["ninja on PATH"] = f"Put {Path(sys.executable).parent} on PATH: it has ninja, or pip install ninja."
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found["Python.h"] = "apt-get install python3-dev."
    has_nvcc = shutil.which("nvcc") is not None or "CUDA_HOME" in os.environ
    if torch.version.cuda and torch.cuda.is_available() and not has_nvcc:
        found["nvcc"] = f"Install the CUDA toolkit {torch.version.cuda}, and set CUDA_HOME."
    return found


def four_bit_line(device: torch.device, is_needed: bool) -> Outcome:
    """Whether the error of the round trip is the known one. If the run does not quantise, a fault is a warning."""
    bad: Status = "fail" if is_needed else "warn"
    if not is_needed and find_spec("bitsandbytes") is None:
        return Outcome(_FOUR_BIT, "ok", "not installed; only --method qlora and 8-bit optimizers need it")
    try:
        error = round_trip_error(device)
    except Exception as refusal:  # a missing library or symbol, or a build for another CUDA
        reason = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
        cure = "python -m bitsandbytes says more. Only --method qlora and 8-bit optimizers need it."
        return Outcome(_FOUR_BIT, bad, f"does not run on {device.type}: {reason}", cure)
    found = f"NF4 and back on {device.type}: mean error {error:.4f}, known {KNOWN_ERROR}"
    if abs(error - KNOWN_ERROR) <= _TOLERANCE * KNOWN_ERROR:
        return Outcome(_FOUR_BIT, "ok", found)
    cure = "Do not use --method qlora here: install the bitsandbytes of constraints.txt."
    return Outcome(_FOUR_BIT, bad, found, cure)


def round_trip_error(device: torch.device) -> float:
    """Mean absolute error of normal numbers that are quantised to NF4 and back."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # slow, and may fail

    weights = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)).to(device)
    packed, state = quantize_4bit(weights, blocksize=64, quant_type="nf4")
    return float((dequantize_4bit(packed, state) - weights).abs().mean())


def gpu_facts(local_rank: int) -> dict[str, Any]:
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


def gpu_lines(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Outcome]:
    """What is wrong with the GPUs of the ranks, by `gpu_facts` of each, or one line that is ok."""
    on_host = Counter(hosts)
    found = [*_without_driver(by_rank, hosts), *_shared(by_rank, hosts), *_unlike(by_rank, hosts)]
    for host, processes in on_host.items():
        first = hosts.index(host)
        visible = by_rank[first]["visible"]
        if 0 < visible < processes:
            cure = f"Use --num_processes {visible} a node, or show more GPUs with CUDA_VISIBLE_DEVICES."
            text = f"{processes} processes on {host}, and {visible} visible GPU(s)"
            found.append(Outcome(_GPUS, "fail", text, cure))
        elif visible > processes:
            text = f"{visible} visible GPUs on {host}, and {processes} process(es): {visible - processes} stay unused"
            cure = f"To use and check them all: accelerate launch --multi_gpu --num_processes {visible} ..."
            found.append(Outcome(_GPUS, "warn", text, cure))
    names = Counter(each["name"] or "CPU" for each in by_rank)
    shown = ", ".join(f"{count} x {name}" for name, count in names.items())
    return found or [Outcome(_GPUS, "ok", f"{len(by_rank)} process(es) on {len(on_host)} node(s): {shown}")]


def _without_driver(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Outcome]:
    blind = [rank for rank, each in enumerate(by_rank) if each["driver"]]
    if not blind:
        return []
    if not by_rank[blind[0]]["cuda"]:
        text = f"{named_ranks(blind, hosts)}: this torch is built for the CPU"
        return [Outcome(_GPUS, "fail", text, "Install a CUDA build.")]
    cure = "Check nvidia-smi and CUDA_VISIBLE_DEVICES. The driver must be as new as the CUDA of torch "
    found = f"{named_ranks(blind, hosts)}: there is an NVIDIA GPU, and torch sees none"
    return [Outcome(_GPUS, "fail", found, f"{cure}({by_rank[blind[0]]['cuda']}).")]


def _shared(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Outcome]:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(by_rank):
        if each["uuid"]:
            users.setdefault((hosts[rank], each["uuid"]), []).append(rank)
    cure = "Give each process its own GPU: check CUDA_VISIBLE_DEVICES."
    same = [f"{named_ranks(who, hosts)} have the same GPU" for who in users.values() if len(who) > 1]
    return [Outcome(_GPUS, "fail", text, cure) for text in same]


def _unlike(by_rank: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> list[Outcome]:
    usual, count = Counter(each["name"] for each in by_rank).most_common(1)[0]
    others = [rank for rank, each in enumerate(by_rank) if each["name"] != usual]
    if count == len(by_rank):
        return []
    found = f"{named_ranks(others, hosts)}: {by_rank[others[0]]['name'] or 'CPU'}; the others have {usual or 'CPU'}"
    return [Outcome(_GPUS, "warn", found, "The slowest GPU sets the pace. Use nodes of one kind.")]


def shared_memory_line() -> Outcome:
    """Whether this node has enough of it."""
    if not Path(SHARED_MEMORY).is_dir():
        return Outcome(SHARED_MEMORY, "ok", "this system has none, and needs none")
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    if usage.free < _LEAST_SHARED_BYTES:
        return Outcome(SHARED_MEMORY, "fail", found, f"Remove stale files there. {_MORE_SHARED_MEMORY}")
    if usage.total < _SMALL_SHARED_BYTES:
        return Outcome(SHARED_MEMORY, "warn", found, _MORE_SHARED_MEMORY)
    return Outcome(SHARED_MEMORY, "ok", found)
