"""Write a demo as a folder that a Space of the Hub runs as it is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import SpaceCardData

from indictune.config.arguments import ModelArguments
from indictune.errors import UserError
from indictune.files import json_or_nothing, write_whole
from indictune.hub.card import CARD
from indictune.hub.card_facts import is_hub_name
from indictune.hub.public_text import escaped
from indictune.hub.publish import model_files, published
from indictune.models.adapters import config_file, continues_texts
from indictune.models.atomic_folder import check_output_folder, whole_folder
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction.served_classifier import classifier_config
from indictune.report.report_page import write_without_texts

# Module of the package -> file of a Space.
_SHARED = {"indictune.serving.gradio_pages": "page.py", "indictune.data.languages": "languages.py"}
_PACKAGES = ("torch", "transformers", "tokenizers", "sentencepiece", "protobuf")
_FLAG = "--export"
_ATTRIBUTES = "*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
_README = """\
# {title}

A page to try the model in `model/` on.

```bash
pip install gradio=={gradio} -r requirements.txt
python app.py
```

The texts that you type stay on the machine that runs the page.
"""


def write_space(model: Path, target: Path) -> None:
    """Write app, requirements, README and the model's files into a new or an empty folder, all or nothing.

    Raises:
        UserError: the folder holds no finished model or an adapter, or the target is not empty or cannot be written.
    """
    if (model / ADAPTER_CONFIG).is_file():
        raise UserError("export-of-adapter", _FLAG, target, model=model)
    is_chat = holds_language_model(model)
    if not is_chat:
        classifier_config(ModelArguments(str(model)))
    check_output_folder(target, _FLAG)
    names = published(model, model_files(model))
    with whole_folder(target, _FLAG, sum((model / name).stat().st_size for name in names)) as folder:
        for name in names:
            (folder / "model" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model / name, folder / "model" / name)
        write_without_texts(model, folder / "model")
        for name, text in _files(model, is_chat).items():
            write_whole(folder / name, text)


def _files(model: Path, is_chat: bool) -> dict[str, str]:
    """Name -> content of the files next to the model's."""
    title = model.resolve().name
    app = _source(f"indictune.serving.space_{'chat' if is_chat else 'classifier'}")
    modules = ["indictune.serving.gradio_pages", *([] if is_chat else ["indictune.data.languages"])]
    packages = _PACKAGES if is_chat else (*_PACKAGES, "lingua-language-detector")
    needed = [f"{name}=={version(name).partition('+')[0]}" for name in packages]  # without the build, as in 2.13.0+cpu
    return {
        "app.py": app.replace('"TITLE"', json.dumps(title, ensure_ascii=False)),
        **{_SHARED[module]: _source(module) for module in modules},
        "requirements.txt": "".join(f"{line}\n" for line in needed),
        ".gitattributes": _ATTRIBUTES,
        CARD: _readme(model, title),
    }


def _source(module: str) -> str:
    package, _, name = module.rpartition(".")
    text = resources.files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    for shared, file in _SHARED.items():
        text = text.replace(f"from {shared} import", f"from {file.removesuffix('.py')} import")
    return text


def _readme(model: Path, title: str) -> str:
    card = (model / CARD).read_text(encoding="utf-8") if (model / CARD).is_file() else ""
    found = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
    described: Mapping[str, Any] = yaml.safe_load(found[1]) if found else {}
    metadata = SpaceCardData(
        title=title,
        sdk="gradio",
        sdk_version=version("gradio"),
        app_file="app.py",
        license=described.get("license"),
        models=[base] if is_hub_name(base := str(described.get("base_model") or "")) else None,
        emoji="💬",
        colorFrom="indigo",
        colorTo="green",
    )
    return f"---\n{metadata.to_yaml()}\n---\n\n{_README.format(title=escaped(title), gradio=version('gradio'))}"


def holds_language_model(folder: Path) -> bool:
    """Whether the folder holds a language model. A folder without a model does not."""
    return continues_texts(json_or_nothing(config_file(folder)).get("architectures"))
