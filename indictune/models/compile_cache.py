"""Where torch keeps what it compiles: pickles and machine code, taken again without a look at whose they are."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from indictune.errors import UserError


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
            "--torch_compile, or what compiles by itself (flex attention; on a CPU --method qlora, weights in 4 bit, "
            "a merge in 4 bit): "
            f"{folder} can be written by other users, and torch runs what it finds compiled there. Remove it, or name "
            "a folder of your own by TMPDIR."
        )


def _has_one_user(group: int) -> bool:
    """Whether a group is this user's private one: of the user's name, as most Linux distributions make it, whose umask
    lets it write."""
    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:  # a container's user without a name
        return False
    return (found.gr_gid, found.gr_name) == (user.pw_gid, user.pw_name) and {*found.gr_mem} <= {user.pw_name}
