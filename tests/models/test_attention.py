"""The attention of rows that are joined: each document by itself, by the kernel that fits."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification

from indictune.models import attention
from indictune.models.attention import ATTENTION
from indictune.models.unpadded import classify_unpadded
from tests.models.test_unpadded import batches, causal, classifier


def test_neighbours_of_like_length_are_computed_together() -> None:
    assert list(attention._runs([30, 24, 20, 19, 6, 9, 5])) == [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    assert list(attention._runs([7])) == [slice(0, 1)]


def test_attention_that_lets_rows_see_each_other_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = classifier("bert")
    padded, joined = batches(model)
    expected = model(**padded).logits
    classify_unpadded(model)
    monkeypatch.setattr(attention, "_visible", lambda *_: None)
    assert (model(**joined).logits - expected).abs().max() > 1e-3


def test_where_documents_stand_is_found_once_for_all_layers() -> None:
    """Else a GPU would be waited for in every layer."""
    model = classifier("modernbert")
    _, joined = batches(model)
    classify_unpadded(model)
    attention._by_length.cache_clear()
    model(**joined)
    found = attention._by_length.cache_info()
    assert (found.misses, found.hits) == (1, model.config.num_hidden_layers - 1)
    joined["cu_seq_lens_q"] = joined["cu_seq_lens_q"].clone()  # another batch, for all that is known
    model(**joined)
    assert attention._by_length.cache_info().misses == 2


def test_groups_of_heads_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself is CUDA's."""

    def kernel(*states: Any, enable_gqa: bool = False, **options: Any) -> torch.Tensor:
        assert enable_gqa
        query, key, value = (each.transpose(0, 1) for each in states[:3])
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa).transpose(0, 1)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    torch.manual_seed(0)
    states = torch.randn(1, 6, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    found = attention._varlen_attention(states, torch.tensor([0, 9], dtype=torch.int32), 9, None, (-1, -1))
    expected = functional.scaled_dot_product_attention(*states, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)


class Calls(TorchDispatchMode):
    """Notes how an operation of torch is called."""

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = name
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == self.name:
            self.seen.append((args, kwargs))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("window", "causal"), [((-1, -1), False), ((-1, 0), True), ((6, 0), False), ((6, 6), False)])
def test_the_kernel_with_dropout_is_called_as_it_is_declared(window: tuple[int, int], causal: bool) -> None:
    """It is CUDA's; a tensor without data knows its shapes, and has its gradient."""
    states = [
        torch.randn(1, 50, heads, 64, device="meta", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]
    query, key, value = states
    boundaries = torch.tensor([0, 20, 50], dtype=torch.int32, device="meta")
    with Calls("_flash_attention_forward") as calls:
        found = attention._flash_attention((query, key, value), boundaries, 30, 0.1, 0.5, window)
    assert (found.shape, found.dtype) == ((1, 50, 4, 64), torch.bfloat16)
    gradients = torch.autograd.grad(found, states, torch.ones_like(found))
    assert [each.shape for each in gradients] == [each.shape for each in states]
    (((_, given_key, _, *others), options),) = calls.seen
    assert given_key.shape[1] == 2
    assert others[2:] == [30, 30, 0.1, causal, False]
    assert options == {"scale": 0.5, "window_size_left": window[0], "window_size_right": window[1]}


class OnGpu(torch.Tensor):
    """A tensor without data that says that it lies on a GPU."""

    is_cuda = True


def causal_with_dropout(monkeypatch: pytest.MonkeyPatch, window: int | None, width: int) -> Calls:
    """How the kernel is called. Without data, whatever reads the boundaries fails, as padded attention does."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(attention, "as_computed", lambda states: states)  # autocast knows no such device
    attention._has_varlen_kernel.cache_clear()
    query, key, value = (
        torch.empty(1, heads, 50, width, device="meta", dtype=torch.bfloat16).as_subclass(OnGpu) for heads in (4, 2, 2)
    )
    boundaries = torch.empty(3, device="meta", dtype=torch.int32)
    given: dict[str, Any] = {"cu_seq_lens_q": boundaries, "max_length_q": 30, "sliding_window": window}
    module = causal("llama").model.layers[0].self_attn
    calls = Calls("_flash_attention_forward")
    with calls:
        attention.unpadded_attention(module, query, key, value, None, 0.1, **given)
    return calls


@pytest.mark.parametrize(("window", "sides"), [(None, (-1, 0)), (7, (6, 0))])
def test_a_causal_model_with_dropout_takes_the_kernel_that_has_it(
    monkeypatch: pytest.MonkeyPatch, window: int | None, sides: tuple[int, int]
) -> None:
    """A GPU would be waited for to read the boundaries."""
    ((_, options),) = causal_with_dropout(monkeypatch, window, 64).seen
    assert (options["window_size_left"], options["window_size_right"]) == sides


def test_the_kernel_gets_no_heads_of_which_it_may_compute_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="meta tensor"):
        causal_with_dropout(monkeypatch, None, 256)


def test_torchs_attention_for_many_lengths_has_no_dropout() -> None:
    """Where it gets it, `_flash_attention` may go."""
    assert not {"dropout", "dropout_p"} & set(signature(varlen_attn).parameters)


@pytest.mark.parametrize("heads_first", [False, True])
def test_nested_attention_is_attention_by_length(heads_first: bool) -> None:
    """The way that a GPU takes in fp32, or before Ampere."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 4, 50, 8)
    if not heads_first:  # as models make them
        query, key, value = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value))
    boundaries = torch.tensor([0, 20, 40, 45, 50], dtype=torch.int32)
    module = classifier("bert").bert.encoder.layer[0].attention.self
    nested = attention._nested_attention((query, key, value), boundaries, 20, 0.0, 0.5)
    by_length = attention._attention_by_length(module, (query, key, value), boundaries, 0.0, 0.5, None)
    torch.testing.assert_close(nested, by_length, rtol=0, atol=1e-5)


def test_the_attention_is_not_written_into_a_saved_model(tmp_path: Any) -> None:
    model = classifier("bert")
    classify_unpadded(model)
    assert model.config._attn_implementation == ATTENTION
    model.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize("autocast", [False, True])
def test_states_that_positions_made_fp32_are_computed_in_the_type_of_autocast(autocast: bool) -> None:
    """transformers rotates a bf16 query by fp32 cosines; the kernel for joined rows takes bf16 alone."""
    states = (torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = attention.as_computed(states)
    assert {each.dtype for each in found} == {torch.bfloat16 if autocast else torch.float32}


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "has"),
    [
        ((9, 0), torch.bfloat16, 64, True),
        ((8, 0), torch.float16, 256, True),
        ((7, 5), torch.float16, 64, False),  # a T4, whose users give --fp16
        ((9, 0), torch.float32, 64, False),
        ((9, 0), torch.bfloat16, 260, False),
        ((9, 0), torch.bfloat16, 36, False),
    ],
)
def test_a_gpu_or_a_head_that_the_kernel_does_not_take_is_left_to_others(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, width: int, has: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    attention._has_varlen_kernel.cache_clear()
    assert attention._has_varlen_kernel(dtype, width, torch.device("cuda")) is has
    attention._has_varlen_kernel.cache_clear()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_in_bf16_a_cpu_computes_attention_in_fp32(dropout: float) -> None:
    """Only what is read and what is given is rounded."""
    boundaries = torch.tensor([0, 20, 35, 50], dtype=torch.int32)
    query, key, value = torch.randn(3, 1, 4, 50, 8).bfloat16()
    module = classifier("bert").bert.encoder.layer[0].attention.self
    torch.manual_seed(0)
    found = attention._attention_by_length(module, (query, key, value), boundaries, dropout, None, None)
    torch.manual_seed(0)
    exact = query.float(), key.float(), value.float()
    expected = attention._attention_by_length(module, exact, boundaries, dropout, None, None)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0)
