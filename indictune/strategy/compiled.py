"""Where torch keeps what it compiles: pickles and machine code, taken again without a look at whose they are."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from indictune.errors import UserError

FLAGS = ("torch_compile", "torch_compile_backend", "torch_compile_mode")  # by any of which the model is compiled


def check_compiling(training: Callable[[str], Any], model: Callable[[str], Any], environ: Mapping[str, str]) -> None:
    """Refuse what compiles without the recipe's knowledge, or where others can write to what torch has compiled.

    Args:
        training: the value that a field of the training arguments will have.
        model: the same of the model's.
        environ: of this process.

    Raises:
        UserError: the launcher asks to compile, or other users can write to torch's folder.
    """
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if backend != "NO":
        raise UserError(
            f"accelerate's --dynamo_backend (dynamo_config in its file) is {backend.lower()}: recipe.yaml would not "
            "have it. Leave it out, and give the script "
            f"--torch_compile true --torch_compile_backend {backend.lower()}."
        )
    if is_asked_for(training, model):
        check_kept_from_others()


def is_asked_for(training: Callable[[str], Any], model: Callable[[str], Any]) -> bool:
    """Whether torch compiles for a run: its own code, an attention, or bitsandbytes' (0.50) on a CPU, whose library
    does not know every shape; that of GPUs has all.

    Args:
        training: the value that a field of the training arguments will have.
        model: the same of the model's.
    """
    of_4_bits = model("method") == "qlora" and not torch.cuda.is_available()
    return of_4_bits or model("attn_implementation") == "flex_attention" or any(map(training, FLAGS))


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
    is_open = found.st_mode & (0o002 if _has_one_user(found.st_gid) else 0o022)
    if is_own and found.st_mode & 0o022 and not any(folder.iterdir()):
        folder.chmod(0o700)  # torch makes it, too, as the umask says, when it is imported
        is_open = 0
    if not is_own or is_open or can_be_replaced:
        raise UserError(
            f"--torch_compile, or what compiles by itself (flex attention, --method qlora on a CPU): {folder} can be "
            "written by other users, and torch runs what it finds compiled there. Remove it, or name a folder of your "
            "own by TMPDIR."
        )


def _has_one_user(group: int) -> bool:
    """Whether a group is this user's private one: of the user's name, as most Linux distributions make it, whose umask
    lets it write."""
    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # a container's user without a name
        return False
    return (found.gr_gid, found.gr_name) == (user.pw_gid, user.pw_name) and {*found.gr_mem} <= {user.pw_name}
