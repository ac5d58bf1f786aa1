"""Which library runs a strategy."""

from __future__ import annotations

_ENGINES = {
    "3d": "tp",
    "ddp_tp": "tp",
    "hsdp": "fsdp2",
    "fsdp2_tp": "fsdp2",
    "fsdp2_cp": "fsdp2",
    "zero1_tp": "zero1",
    "zero2_tp": "zero2",
    "pipeline": "ddp",  # plain process groups, as accelerate sees it
}


def engine_of(strategy: str) -> str:
    """The name of a strategy without offloading, and without the axes that its engine or this package adds."""
    name = strategy.removesuffix("_offload")
    return _ENGINES.get(name, name)
