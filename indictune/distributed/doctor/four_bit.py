"""Whether bitsandbytes loads and quantises right on a device: weights to NF4 and back, against the known error."""

from __future__ import annotations

import torch

from indictune.distributed.doctor.lines import Line, Status

CHECK = "bitsandbytes"
# Mean absolute error on a normal distribution: of the 16 values of NF4 (QLoRA, appendix E), with blocks of 64.
KNOWN_ERROR = 0.0728
_SIDE = 256
_TOLERANCE = 0.03  # of the error: that of 65,536 samples


def four_bit_line(device: torch.device, is_needed: bool) -> Line:
    """Whether the error of the round trip is the known one.

    Args:
        device: that quantises.
        is_needed: whether the run quantises; else a fault is a warning.
    """
    bad: Status = "fail" if is_needed else "warn"
    try:
        error = round_trip_error(device)
    except Exception as refusal:  # a missing library or symbol, or a build for another CUDA
        reason = f"{type(refusal).__name__}: {refusal}".partition("\n")[0]
        cure = "python -m bitsandbytes says more. Only --method qlora and 8-bit optimizers need it."
        return Line(CHECK, bad, f"does not run on {device.type}: {reason}", cure)
    found = f"NF4 and back on {device.type}: mean error {error:.4f}, known {KNOWN_ERROR}"
    if abs(error - KNOWN_ERROR) <= _TOLERANCE * KNOWN_ERROR:
        return Line(CHECK, "ok", found)
    return Line(CHECK, bad, found, "Do not use --method qlora here: install the bitsandbytes of constraints.txt.")


def round_trip_error(device: torch.device) -> float:
    """Mean absolute error of normal numbers that are quantised to NF4 and back."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # slow, and may fail

    weights = torch.randn(_SIDE, _SIDE, generator=torch.Generator().manual_seed(0)).to(device)
    packed, state = quantize_4bit(weights, blocksize=64, quant_type="nf4")
    return float((dequantize_4bit(packed, state) - weights).abs().mean())
