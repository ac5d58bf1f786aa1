"""The model card: `README.md` of a model's folder, made from the other files there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from indictune.files import write_whole
from indictune.hub.card_facts import Facts, facts_of
from indictune.hub.card_metadata import metadata_of
from indictune.hub.card_results import results_in
from indictune.hub.card_usage import usage_of
from indictune.hub.public_text import Verbatim, escaped, fenced, table
from indictune.models import builtin
from indictune.models.classifier import KEY

CARD = "README.md"
_MOST_DEFECTS = 20
_KINDS = {
    "text-classification": "A text classifier",
    "token-classification": "A classifier of words (named entities)",
    "text-generation": "A language model that answers messages",
    None: "A model",
}
# Of the recipe: what a reader asks of a training, and what the card calls it.
_SETTINGS = {
    "method": "method",
    "lora_r": "rank of the adapter",
    "lora_alpha": "alpha of the adapter",
    "learning_rate": "learning rate",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup (steps or a share)",
    "weight_decay": "weight decay",
    "optim": "optimizer",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_length": "longest text, in tokens",
    "seed": "seed",
}


def write_card(folder: Path, repository: str | None = None, run: Path | None = None) -> None:
    """Write the card of a finished run or of a model made from one. It replaces those of PEFT and TRL.

    Args:
        folder: of the model.
        repository: on the Hub; None if it has none.
        run: folder of the run that made the model; None if it is `folder`.

    Raises:
        UserError: the folder holds an adapter whose record of its base cannot be read.
        OSError: the disk does not take it.
    """
    write_whole(folder / CARD, str(card_of(facts_of(folder, repository, run or folder))))


def card_of(facts: Facts) -> ModelCard:
    """The card: whatever the facts hold is escaped, except code that is fenced."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    metadata = metadata_of(facts)
    text = environment.get_template("card.md.jinja").render(
        licence=metadata.license,
        usage=usage_of(facts),
        task=facts.pipeline_tag,
        **_head(facts),
        **results_in(facts),
        **_data(facts),
        **_training(facts),
    )
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text.strip()}\n")


def _head(facts: Facts) -> dict[str, Any]:
    name = str(facts.settings.get("model_name_or_path") or "")
    return {
        "title": facts.model.rpartition("/")[2],
        "kind": _KINDS[facts.pipeline_tag],
        "base": facts.base,
        "base_link": facts.base and _link(facts.base, ""),
        "from_scratch": name.startswith(builtin.PREFIX) and not facts.is_adapter,
        "labels": _listed(facts.labels),
        "languages": _listed(facts.languages),
        "reading": facts.config.get(KEY),
        "exported": facts.exported,
    }


def _data(facts: Facts) -> dict[str, Any]:
    data: Mapping[str, Any] = facts.metrics.get("data") or {}
    languages: Mapping[str, int] = data.get("languages") or {}
    labels: Mapping[str, int] = data.get("labels") or {}
    body = [[f"language {name}", f"{count:,}"] for name, count in languages.items()]
    body += [[f"label {name}", f"{count:,}"] for name, count in labels.items()]
    total = [["all", f"{data['rows']:,}"]] if "rows" in data else []
    source = str(facts.settings.get("dataset_name") or "")
    is_ours = source.startswith(builtin.PREFIX)
    return {
        "rows": table(["training rows", "count"], [*body, *total]) if total else None,
        "dataset": facts.dataset,
        "dataset_link": facts.dataset and _link(facts.dataset, "datasets/"),
        "sources": f"{source}, which comes with indictune" if is_ours else "files of the user",
        "defects": (data.get("notes") or [])[:_MOST_DEFECTS],
    }


def _training(facts: Facts) -> dict[str, Any]:
    metrics, settings = facts.metrics, facts.settings
    train: Mapping[str, Any] = metrics.get("train") or {}
    unused = [] if facts.is_adapter else ["lora_r", "lora_alpha"]
    unused += ["max_steps"] if settings.get("max_steps") == -1 else ["num_train_epochs"]
    body = {
        **facts.how_it_ran,
        **{shown: settings.get(name) for name, shown in _SETTINGS.items() if name not in unused},
        "training time, in seconds": f"{train['runtime_s']:,.0f}" if "runtime_s" in train else None,
        **_energy(facts),
    }
    shown = [[name, _plain(value)] for name, value in body.items() if value not in (None, "")]
    versions = [f"{name} {version}" for name, version in (metrics.get("versions") or {}).items()]
    return {
        "training": table(["", ""], shown),
        "command": fenced(facts.command, "bash") if facts.chosen else None,
        "versions": ", ".join(versions),
    }


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _energy(facts: Facts) -> dict[str, str]:
    """What codecarbon measured, if the run asked for it."""
    measured = facts.energy
    if not {"energy_consumed", "emissions"} <= measured.keys():
        return {}
    return {
        "energy, in kWh (codecarbon)": f"{float(measured['energy_consumed']):.4g}",
        "emissions, in kg of CO2 (codecarbon)": f"{float(measured['emissions']):.4g}",
    }


def _link(name: str, kind: str) -> Verbatim:
    """A link to the Hub. The name is one of the Hub's form."""
    return Verbatim(f"[{name}](https://huggingface.co/{kind}{name})")


def _listed(names: Sequence[str]) -> Verbatim:
    return Verbatim(", ".join(map(escaped, names)))
