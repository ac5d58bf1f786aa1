"""`indictune demo`: a page to try a finished run's model on, here or as a Space of the Hub."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from huggingface_hub import SpaceCardData, metadata_load

from indictune.commands.push import check_publishable
from indictune.commands.serve import ShownModelArguments
from indictune.config.arguments import ModelArguments
from indictune.config.recipe import read_arguments
from indictune.config.shared_arguments import ClassifierArguments, RequestLimits, flag
from indictune.errors import Problems, UserError, problem
from indictune.files import json_or_nothing, write_whole
from indictune.hub.card import CARD
from indictune.hub.card_facts import is_hub_name
from indictune.hub.public_text import escaped
from indictune.hub.publish import model_files, published
from indictune.models.adapters import config_file, continues_texts
from indictune.models.atomic_folder import check_output_folder, whole_folder
from indictune.models.trusted_files import ADAPTER_CONFIG
from indictune.prediction.chat_model import ChatModel, TooLongError, open_chat_model
from indictune.prediction.labelled_rows import as_records, label, text_batch
from indictune.prediction.served_classifier import Classifier, classifier_config, load_served_classifier
from indictune.report.report_page import write_without_texts
from indictune.versions import check_extra

if TYPE_CHECKING:  # imports Gradio, which may be missing
    from indictune.serving.gradio_pages import Answer, Classify, Message, Reply

# Module of the package -> file of a Space.
_SHARED = {"indictune.serving.gradio_pages": "page.py", "indictune.data.languages": "languages.py"}
_PACKAGES = ("torch", "transformers", "tokenizers", "sentencepiece", "protobuf")
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


def classify_with(classifier: Classifier) -> Classify:
    """Labels a text, or a pair, as `indictune predict` does."""
    from indictune.serving.gradio_pages import Answer

    def classify(text: str, second: str | None = None) -> Answer:
        (row,) = as_records(label(classifier, text_batch([text if second is None else (text, second)])))
        given = row["label"]
        if given is None:
            return Answer("", None, row["language"])
        name = ", ".join(given) or "none" if isinstance(given, list) else str(given)
        return Answer(name, row.get("scores"), row["language"])

    return classify


def reply_with(model: ChatModel) -> Reply:
    """Answers a conversation as `indictune chat` does. One answer is made at a time."""
    one_at_a_time = threading.Lock()

    def reply(messages: list[Message]) -> Iterator[str]:
        pieces: SimpleQueue[str | None] = SimpleQueue()

        def answer() -> None:
            try:
                with one_at_a_time:
                    replace(model, messages=messages[:-1]).answer(messages[-1]["content"], pieces.put)
            except TooLongError as error:
                pieces.put(str(error))
            finally:
                pieces.put(None)

        threading.Thread(target=answer, daemon=True).start()
        said = ""
        while (piece := pieces.get()) is not None:
            said += piece
            yield said
        if not said:
            yield "(the model ended its answer at once)"

    return reply


@dataclass
class DemoFlags(ShownModelArguments):
    """Which finished model is shown on a page, and where."""

    needed = ("model", "indictune demo FOLDER, where FOLDER is the --output_dir of a finished run.")

    port: int = flag(7860, "Port to listen on; 0 takes a free one.")
    export: str | None = flag(
        None, "Write a folder that a Space of the Hub runs, instead of starting the page. Must not exist, or be empty."
    )
    max_new_tokens: int | None = flag(None, "Most tokens of an answer of a language model. Default: 256.")
    temperature: float | None = flag(
        None, "How a language model draws tokens: 0, the default, takes the likeliest one. 1 is usual."
    )

    @property
    def of_answers(self) -> dict[str, Any]:
        """The flags of a language model on this machine that are given."""
        given = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


def run_demo(flags: Mapping[str, list[str]]) -> int:
    """Show a model on a page until a signal ends it, or write the page as a Space."""
    args = read_arguments(flags, DemoFlags, "model")
    check_extra("demo", "demo", "gradio")
    if args.export is not None or not holds_language_model(Path(args.model)):
        other = "a classifier" if args.export is None else "--export"
        given = [(f"--{name}", value) for name, value in args.of_answers.items()]
        Problems(problem("no-effect", *each, other=other) for each in given).raise_any()
    if args.export is not None:
        write_space(Path(args.model), Path(args.export))
        print(f"Written to {args.export}. To publish it: hf upload you/{args.name} {args.export} --repo-type space")
        return 0
    from indictune.serving.server import bound, run_server

    problems = Problems()
    listener = problems.attempt(bound, args.host, args.port)
    page = problems.attempt(demo_app, args)
    problems.raise_any()
    assert listener is not None
    assert page is not None
    with listener:
        limits = RequestLimits(request_timeout=86_400, trusted_proxy=["127.0.0.1"])  # a page listens while it is open
        run_server(page, listener, lambda url: f"{args.name} is on {url}. Ctrl-C stops it.", limits)
    return 0


def demo_app(args: DemoFlags) -> Any:
    """The application for the kind of model in the folder; a `UserError` with every problem of the model."""
    from fastapi import FastAPI
    from gradio import mount_gradio_app

    from indictune.serving import gradio_pages

    if holds_language_model(Path(args.model)):
        model = open_chat_model(args.model, **args.of_answers, trust_remote_code=args.trust_remote_code)
        blocks = gradio_pages.chat_page(args.name, reply_with(model))
    else:
        classifier = load_served_classifier(ClassifierArguments(args.model, trust_remote_code=args.trust_remote_code))
        pairs = classifier.served.reading.text_pair_column is not None
        blocks = gradio_pages.classifier_page(args.name, classify_with(classifier), pairs)
    return mount_gradio_app(FastAPI(), blocks, "/", **gradio_pages.SERVER)


def write_space(model: Path, target: Path) -> None:
    """Write app, requirements, README and the model's files into a new or an empty folder, all or nothing.

    Raises:
        UserError: the folder holds no finished model or an adapter, or the target is not empty or cannot be written.
    """
    if (model / ADAPTER_CONFIG).is_file():
        raise UserError("export-of-adapter", "--export", target, model=model)
    is_chat = holds_language_model(model)
    if not is_chat:
        classifier_config(ModelArguments(str(model)))
    check_publishable(model, "--model")
    check_output_folder(target, "--export")
    names = published(model, model_files(model))
    with whole_folder(target, "--export", sum((model / name).stat().st_size for name in names)) as folder:
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
    described = (metadata_load(model / CARD) if (model / CARD).is_file() else None) or {}
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
