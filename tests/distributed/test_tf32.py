"""A compiled model multiplies fp32 as `--tf32` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch._inductor.select_algorithm import create_precompile_key

from tests.training.tiny import answer_rows, tiny_llama, tiny_trainer


@pytest.fixture
def set_up_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tf32_as_before: None) -> list[str]:
    """How fp32 is multiplied after accelerate is set up, each time: on a CPU that it takes for a GPU meanwhile."""
    after: list[str] = []
    set_up = AcceleratorState.__init__

    def on_a_gpu(self: AcceleratorState, *args: Any, **settings: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(AcceleratorState, "device", property(lambda _: torch.device("cuda")), raising=False)
            set_up(self, *args, **settings)
        after.append(torch.backends.cuda.matmul.fp32_precision)

    monkeypatch.setattr(AcceleratorState, "__init__", on_a_gpu)
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    return after


@pytest.mark.parametrize(("tf32", "precision"), [(False, "ieee"), (True, "tf32")])
def test_a_compiled_model_multiplies_fp32_as_configured(
    tmp_path: Path, set_up_on_a_gpu: list[str], tf32: bool, precision: str
) -> None:
    """`undo_tf32_of_accelerate` can go where accelerate (1.15) no longer switches TF32 on after it was off."""
    settings: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "eager", "tf32": tf32}
    tiny_trainer(tiny_llama(tmp_path / "base"), tmp_path / "out", answer_rows(9, 5), **settings)
    assert set_up_on_a_gpu == ["tf32"]
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert ("highest" in create_precompile_key("mm", "", [])) is not tf32
