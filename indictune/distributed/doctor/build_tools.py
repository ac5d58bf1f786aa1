"""The compiler and ninja, with which DeepSpeed builds its CPU Adam for offloaded optimizers."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from indictune.config.plan import Launch
from indictune.distributed.doctor.lines import Line

CHECK = "CPU Adam"


def build_line(launch: Launch) -> Line:
    """Whether CPU Adam can be built on this node. Only DeepSpeed with an offloaded optimizer needs it."""
    missing = _missing()
    zero = (launch.deepspeed or {}).get("zero_optimization") or {}
    is_needed = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if not missing:
        return Line(CHECK, "ok", f"{shutil.which(_compiler())} and {shutil.which('ninja')} build it in 1 to 2 minutes")
    found, cure = f"cannot be built without {', '.join(missing)}", " ".join(missing.values())
    if is_needed:
        return Line(CHECK, "fail", f"{found}, and {launch.strategy} needs it", cure)
    return Line(CHECK, "ok", f"{found}; only an offloaded optimizer under DeepSpeed needs it")


def _missing() -> dict[str, str]:
    """What is missing for a build -> the cure."""
    found = {}
    if shutil.which(_compiler()) is None:
        found["a C++ compiler"] = "apt-get install g++, or set CXX."
    if shutil.which("ninja") is None:
        found["ninja on PATH"] = f"Put {Path(sys.executable).parent} on PATH: it has ninja, or pip install ninja."
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        found["Python.h"] = "apt-get install python3-dev."
    if (
        torch.version.cuda
        and torch.cuda.is_available()
        and shutil.which("nvcc") is None
        and "CUDA_HOME" not in os.environ
    ):
        found["nvcc"] = f"Install the CUDA toolkit {torch.version.cuda}, and set CUDA_HOME."
    return found


def _compiler() -> str:
    return os.environ.get("CXX", "c++").split()[0]
