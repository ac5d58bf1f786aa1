"""The disk of `--output_dir`: its free space, how fast it writes, and whether the nodes share it."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path

from indictune.config.plan import AnyPlan
from indictune.distributed.devices import meta_of
from indictune.distributed.doctor.lines import Line
from indictune.distributed.planning.written_bytes import checkpoint_of_node

CHECK = "--output_dir"
_WRITTEN_BYTES = 32 << 20
_CHUNK = os.urandom(1 << 20)  # a file system may compress zeros
_SLOW_S = 600.0  # to write a checkpoint


def disk_of(folder: Path) -> Path:
    """The folder, or the nearest one around it that exists. Nothing is made."""
    return next(each for each in (folder, *folder.absolute().parents) if each.exists())


def disk_line(plan: AnyPlan, timed: bool) -> Line:
    """Whether the checkpoints of a run fit, and how fast they are written.

    Args:
        plan: of the run.
        timed: whether to write something.
    """
    folder = disk_of(plan.output_dir)
    meta = meta_of(plan) if plan.training.save_strategy != "no" else None
    size = 0 if meta is None else checkpoint_of_node(plan, meta)
    kept = 1 + (plan.training.save_total_limit or 1)
    try:
        free = shutil.disk_usage(folder).free
        enough = free >= max(size, _WRITTEN_BYTES)
        rate = write_rate(folder) if timed and enough else 0.0
    except OSError as error:
        return Line(CHECK, "fail", f"{folder} cannot be written: {error.strerror}", "Check its permissions and quota.")
    found = f"{free / 1e9:,.1f} GB free"
    if size:
        found += f"; a checkpoint takes {size / 1e9:,.2f} GB, and there are {kept} at once"
    if free < size * kept or not enough:
        cure = "Use a folder on another disk, or a smaller --save_total_limit."
        return Line(CHECK, "warn" if enough else "fail", found, cure)
    found += f"; it writes {rate / 1e6:,.0f} MB/s" if rate else ""
    if rate and size / rate > _SLOW_S:
        slow = f"{found}: {size / rate:,.0f} s for a checkpoint"
        return Line(CHECK, "warn", slow, "Use a faster disk, or --async_save.")
    return Line(CHECK, "ok", found)


def write_rate(folder: Path) -> float:
    """Bytes a second, fsync included, of a file that is then deleted.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / f".doctor-{uuid.uuid4().hex}"
    began = time.perf_counter()
    try:
        with file.open("wb") as written:
            for _ in range(_WRITTEN_BYTES // len(_CHUNK)):
                written.write(_CHUNK)
            written.flush()
            os.fsync(written.fileno())
        return _WRITTEN_BYTES / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)
