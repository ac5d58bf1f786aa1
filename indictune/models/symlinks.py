"""Links in a model's folder: what one brings in from elsewhere nobody could tell, and it would be given away."""

from __future__ import annotations

from pathlib import Path

from indictune.errors import UserError

# A link to weights shows nothing of what it leads to, and weights are often kept elsewhere. Anything else may be read
# as text and saved again with a trained model: a vocabulary has whatever name its tokenizer's class gives it.
_WEIGHTS = frozenset({".safetensors", ".bin", ".h5", ".msgpack"})


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a file in a model's folder is a link that leads out of it."""
    root, leads_to = folder.resolve(), path.resolve()
    if leads_to.is_relative_to(root):
        return False
    # In the Hub's cache files are links to `blobs` beside the snapshots.
    is_cached = root.parent.name == "snapshots" and root.parents[1].name.startswith("models--")
    return not (is_cached and leads_to.is_relative_to(root.parents[1] / "blobs"))


def check_links(folder: Path, flag: str) -> None:
    """Refuse a model with links to files elsewhere, but for weights.

    Args:
        folder: of the model.
        flag: how a message names it.

    Raises:
        UserError: with all such links.
    """
    files = [path for path in folder.glob("*") if path.suffix not in _WEIGHTS and not path.is_dir()]
    read = [*files, *folder.glob("additional_chat_templates/*")]
    found = sorted(path for path in read if path.exists() and leads_out(path, folder))
    if found:
        names = ", ".join(f"{path.relative_to(folder)} ({path.resolve()})" for path in found[:3])
        raise UserError(
            f"{flag}: links lead out of the model's folder: {names}. What is there would be saved with the trained "
            "model. If it belongs to the model, put a copy of it in the link's place."
        )
