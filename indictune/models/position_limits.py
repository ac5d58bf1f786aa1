"""How many tokens of a text a model can read."""

from __future__ import annotations

from transformers import PreTrainedConfig

from indictune.errors import UserError

# These count positions from pad_token_id + 1, so the first rows of their position table are never used.
POSITIONS_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta"}
    | {"xlm-roberta-xl", "xmod"}
)


def check_max_length(config: PreTrainedConfig, max_length: int, begins: bool = True) -> list[str]:
    """Refuse texts that are longer than the model's positions, or whose result depends on other texts.

    Args:
        config: of the model.
        max_length: of a text, in tokens.
        begins: whether this run starts from a fresh model. A resumed run and an evaluation keep the length of the
            training, and only report the dependence on other texts.

    Returns:
        Notes for the user.

    Raises:
        UserError: `max-length-over-positions` or `max-length-over-longrope`.
    """
    model, limit = config.name_or_path, _longrope_limit(config)
    depends = limit is not None and max_length > limit
    if depends and begins:
        raise UserError("max-length-over-longrope", "--max_length", max_length, model=model, limit=limit)
    positions = positions_of(config)
    if positions is not None and max_length > positions:
        raise UserError("max-length-over-positions", "--max_length", max_length, model=model, limit=positions)
    if not depends:
        return []
    return [
        f"--max_length {max_length}: {model} (longrope) reads a micro-batch differently if one of its "
        f"texts has more than {limit} tokens. --per_device_eval_batch_size 1 evaluates each text alone."
    ]


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many tokens a model has positions for; None for no limit.

    transformers also answers for other names of the field, such as GPT-2's `n_positions`. XLNet has -1 for no limit.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None or positions < 0:
        return None
    return positions - (config.pad_token_id + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0)


def _longrope_limit(config: PreTrainedConfig) -> int | None:
    """The original length of a model with LongRoPE (Phi-3, Phi-4-mini), in tokens; None for other models.

    transformers (5.23, `longrope_frequency_update`) chooses the rotation of all positions by the longest text of the
    micro-batch. `dynamic` does so only beyond `max_position_embeddings`.
    """
    rope = config.to_dict().get("rope_parameters") or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, dict)]  # for all layers, or for each type
    stored = [each["original_max_position_embeddings"] for each in kinds if each.get("rope_type") == "longrope"]
    return min((length for length in stored if isinstance(length, int)), default=None)
