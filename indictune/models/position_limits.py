"""How many tokens of a text a model can read."""

from __future__ import annotations

from transformers import PreTrainedConfig

from indictune.errors import UserError

# These count positions from pad_token_id + 1, so the first rows of their position table are never used.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"}
    | {"xlm-roberta-xl", "xmod"}
)


def check_max_length(config: PreTrainedConfig, max_length: int | str) -> None:
    """Refuse texts that are longer than the model's positions. `auto` keeps within them.

    Raises:
        UserError: `max-length-over-positions`.
    """
    positions = positions_of(config)
    if positions is not None and isinstance(max_length, int) and max_length > positions:
        given = "--max_length", max_length
        raise UserError("max-length-over-positions", *given, model=config.name_or_path, limit=positions)


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a model has positions for; None for no limit.

    LongRoPE (Phi-3, Phi-4-mini) is limited to its original length: beyond it, transformers (5.23,
    `longrope_frequency_update`) chooses the rotation of all positions by the longest text of the micro-batch.
    """
    positions = getattr(config, "max_position_embeddings", None)  # also GPT-2's `n_positions`
    if positions is None or positions < 0:  # XLNet has -1
        return None
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # for all layers, or for each type
    original = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    unused = config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
    return min(positions - unused, *original) if original else int(positions - unused)
