"""Where torch keeps what it compiles: pickles and machine code, taken again without a look at whose they are."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from indictune.errors import UserError

_FLAGS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")


def is_asked_for(training: Callable[[str], Any], model: Callable[[str], Any]) -> bool:
    """Whether torch compiles for a run: its own code, an attention, or bitsandbytes' (0.50) on a CPU.

    Args:
        training: the value that a field of the training arguments will have.
        model: the same of the model's.
    """
    by_itself = model("attn_implementation") == "flex_attention" or model("method") == "qlora"
    return by_itself or any(map(training, _FLAGS))


def check_kept_from_others() -> None:
    """Refuse to compile where another user can write to what torch takes for compiled before.

    By default its folder has a known name below /tmp, and torch (2.13, `cache_dir`) takes it whoever has made it. Made
    here first, for this user alone, nobody can put another in its place: /tmp is sticky. To name another folder by
    TORCHINDUCTOR_CACHE_DIR does not do: some of it is kept below the known name all the same (2.13,
    `codecache._HEADER_DIR`, `caching.implementations._OnDiskCacheImpl`).

    Raises:
        UserError: somebody else has made the folder, or others can write to it.
    """
    folder = Path(default_cache_dir())
    folder.mkdir(mode=0o700, exist_ok=True)
    found, above = folder.lstat(), folder.parent.stat()
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    can_be_replaced = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    is_open = found.st_mode & 0o022
    if is_own and is_open and not any(folder.iterdir()):
        folder.chmod(0o700)  # torch makes it, too, as the umask says, when it is imported
        is_open = 0
    if not is_own or is_open or can_be_replaced:
        raise UserError(
            f"--torch_compile, or what compiles by itself: {folder} can be written by other users, and torch runs "
            "what it finds compiled there. Remove it, or name a folder of your own by TMPDIR."
        )
