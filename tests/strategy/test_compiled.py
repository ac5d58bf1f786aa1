"""Whether torch compiles for a run is known, and refused where it may not."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from indictune.errors import UserError
from indictune.strategy.compiled import check_compiling, is_asked_for


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
