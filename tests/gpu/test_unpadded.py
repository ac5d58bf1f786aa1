"""On a GPU, rows joined end to end compute the same as padded rows, and a step never waits for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from indictune.models import attention
from indictune.models.unpadded import CAUSAL, CLASSIFIERS, classify_unpadded, read_unpadded
from tests.models.test_unpadded import batches, causal, classifier, gradients, joined_documents
from tests.ranks.launching import SCRIPT, python, start

pytestmark = pytest.mark.gpu


def on_gpu(batch: dict[str, object]) -> dict[str, object]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The attention functions that were called."""
    taken: set[str] = set()

    def note(way: str, compute: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        taken.add(way)
        return compute(*args)

    for way in ("_varlen_attention", "_flash_attention", "_nested_attention", "_attention_by_length"):
        monkeypatch.setattr(attention, way, partial(note, way, getattr(attention, way)))
    return taken


@pytest.mark.parametrize("model_type", [*CLASSIFIERS, "modernbert-mean"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_logits_and_gradients_are_those_of_the_padded_model(
    computed: set[str], model_type: str, dtype: torch.dtype, bound: float
) -> None:
    """bf16 uses the varlen kernel; fp32 uses nested tensors, or rows by length for windows and causal masks."""
    model = classifier(model_type).cuda()
    padded, joined = map(on_gpu, batches(model))
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        expected = model(**padded).logits.float()
        expected_gradients = gradients(model, expected)
        classify_unpadded(model)
        logits = model(**joined).logits.float()
        found = gradients(model, logits)
    assert (logits - expected).abs().max() <= bound * expected.abs().max()
    for name, gradient in expected_gradients.items():
        assert (found[name] - gradient).norm() <= 2 * bound * gradient.norm() + bound, name
    in_fp32 = {
        "modernbert": {"_nested_attention", "_attention_by_length"},
        "modernbert-mean": {"_nested_attention", "_attention_by_length"},
        "llama": {"_attention_by_length"},
    }
    expected_ways = in_fp32.get(model_type, {"_nested_attention"})
    assert computed == (expected_ways if dtype is torch.float32 else {"_varlen_attention"})


@pytest.mark.parametrize("model_type", [*CLASSIFIERS, "modernbert-mean"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_labelling_gives_the_logits_of_the_padded_model(model_type: str, dtype: torch.dtype, bound: float) -> None:
    model = classifier(model_type).cuda()
    padded, joined = map(on_gpu, batches(model))
    with torch.inference_mode(), torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        expected = model(**padded).logits.float()
        classify_unpadded(model, trains=False)
        assert (model(**joined).logits.float() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_drops_at_the_given_rate(computed: set[str], dtype: torch.dtype) -> None:
    """Over many passes, the mean logits with dropout in attention alone approach those without."""
    model = classifier("bert").cuda()
    classify_unpadded(model)
    _, joined = map(on_gpu, batches(model))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad(), torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
        expected = model(**joined).logits.float()
        for layer in model.bert.encoder.layer:
            layer.attention.self.dropout.p = 0.1
        model.train()
        passes = torch.stack([model(**joined).logits.float() for _ in range(400)])
    without_and_with = {"_varlen_attention", "_flash_attention"}
    assert computed == ({"_nested_attention"} if dtype is torch.float32 else without_and_with)
    assert passes.std(0).min() > 0
    assert ((passes.mean(0) - expected).abs() <= 6 * passes.std(0) / 20 + 0.02 * expected.abs().max()).all()


def test_attention_with_dropout_matches_nested_tensors() -> None:
    """The same kernel with the same seed drops the same, and has the same gradients."""
    boundaries = torch.tensor([0, 20, 40, 45, 64], dtype=torch.int32, device="cuda")
    states = torch.randn(3, 1, 64, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(2, 3).requires_grad_()
    query, key, value = states
    results = []
    flash = partial(attention._flash_attention, window=(-1, -1))
    for compute in (flash, attention._nested_attention):
        torch.manual_seed(0)
        output = compute((query, key, value), boundaries, 20, 0.3, None)
        results += [(output, *torch.autograd.grad(output, states, torch.ones_like(output), retain_graph=True))]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-2)


@pytest.mark.parametrize("window", [(-1, 0), (6, 0), (6, 6)])
def test_attention_with_dropout_sees_only_its_window_of_its_document(window: tuple[int, int]) -> None:
    """With unit vectors as values, the output is the attention probabilities, and dropped ones are 0."""
    torch.manual_seed(0)
    ends = [0, 20, 40, 45, 64]
    boundaries = torch.tensor(ends, dtype=torch.int32, device="cuda")
    query, key = (torch.randn(1, heads, 64, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    value = torch.eye(64, device="cuda", dtype=torch.bfloat16).expand(1, 2, -1, -1).clone()
    states = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    output = attention._flash_attention(states, boundaries, 20, 0.3, None, window)
    number = torch.arange(64, device="cuda")
    document = torch.bucketize(number, boundaries[1:].long(), right=True)
    distance = number[:, None] - number
    left, right = (64 if each == -1 else each for each in window)
    visible = (document[:, None] == document) & (distance <= left) & (-distance <= right)
    kept = output[0].transpose(0, 1) != 0
    assert not (kept & ~visible).any()
    assert int(kept.sum()) / int(4 * visible.sum()) == pytest.approx(0.7, abs=0.06)
    whole = [each.detach().float().requires_grad_() for each in states]
    query, key, value = (each[0].repeat_interleave(4 // each.shape[1], 0) for each in whole)
    scores = (query @ key.mT / 8).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1) * kept / 0.7 @ value).transpose(0, 1)[None]
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=2e-2)
    upwards = torch.randn_like(expected)
    found_gradients = torch.autograd.grad(output, states, upwards.bfloat16())
    for found, gradient in zip(found_gradients, torch.autograd.grad(expected, whole, upwards), strict=True):
        assert (found.float() - gradient).norm() <= 5e-2 * gradient.norm()


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_reads_documents_as_if_alone(computed: set[str], model_type: str) -> None:
    model = causal(model_type).cuda()
    alone, joined = joined_documents()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = torch.cat([model(input_ids=each.cuda(), use_cache=False).logits for each in alone], 1).float()
        read_unpadded(model)
        together = model(**on_gpu(joined), use_cache=False).logits.float()
    assert computed == {"_varlen_attention"}
    assert (together - expected).abs().max() <= 5e-2 * expected.abs().max()


def waits(folder: Path, steps: int, *more: str) -> int:
    """How often the host waited for the GPU in a run of so many bf16 steps without logs."""
    flags = ["--config", "recipes/sentiment/demo.yaml", "--output_dir", str(folder), "--bf16", "true"]
    flags += ["--global_batch_size", "16", "--max_steps", str(steps), "--logging_steps", "1000", *more]
    flags += ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    done = start([*python(), "tests/gpu/waiting.py", SCRIPT, *flags])
    assert done.returncode == 0, done.stderr
    return (folder / "logs/rank-0.log").read_text(encoding="utf-8").count("called a synchronizing CUDA operation")


@pytest.mark.parametrize("flags", [("--dropout", "0"), ("--dropout", "0.1"), ("--class_weights", "balanced")])
def test_a_step_does_not_wait_for_the_gpu(tmp_path: Path, flags: tuple[str, str]) -> None:
    """Attention with dropout uses another kernel."""
    assert waits(tmp_path / "long", 60, *flags) == waits(tmp_path / "short", 20, *flags) > 0
