"""Whether torch compiles for a run is known, and refused where it may not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from indictune.distributed.torch_compile import check_compiling, check_quantised, is_asked_for
from indictune.errors import UserError


def test_what_compiles_by_itself_is_asked_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    off, lora = dict[str, object]().get, {"method": "lora", "attn_implementation": "sdpa"}.get
    assert not is_asked_for(off, lora)
    assert is_asked_for({"torch_compile": True}.get, lora)
    assert is_asked_for({"torch_compile_mode": "max-autotune"}.get, lora)
    assert is_asked_for(off, {"attn_implementation": "flex_attention"}.get)
    assert is_asked_for(off, {"method": "qlora"}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not is_asked_for(off, {"method": "qlora"}.get)


def test_what_accelerate_would_compile_is_refused_with_the_flags_that_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers (5.23) gives accelerate (1.15) no backend of its own, and so it takes the launcher's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    off = dict[str, object]().get
    check_compiling(off, off, {"ACCELERATE_DYNAMO_BACKEND": "NO"})
    with pytest.raises(UserError, match=r"--dynamo_backend .* is inductor: .* --torch_compile_backend inductor"):
        check_compiling(off, off, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"})
    assert not [*tmp_path.iterdir()]


def test_weights_in_4_bits_are_not_compiled_for_where_others_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an evaluation and by `--method lora` too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = Path(default_cache_dir())
    folder.mkdir()
    (folder / "compiled").touch()
    folder.chmod(0o777)
    check_quantised({})
    with pytest.raises(UserError, match=f"{folder} can be written by other users"):
        check_quantised({"load_in_4bit": True})
    folder.chmod(0o700)
    check_quantised({"load_in_4bit": True})
