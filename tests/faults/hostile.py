"""Models and datasets that name files outside of their folder, or link to them, and rows that hold markup. Each is
made below a `root`, and what lies outside holds the word "secret", or is `outside.safetensors`."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from indictune.models.trusted_files import INDEX
from tests.faults.canaries import model_in

ROWS = '{"text": "ok", "label": "a"}\n{"text": "no", "label": "b"}\n'
INDEXED = "embeddings.word_embeddings.weight"

IN_AN_INDEX: tuple[object, ...] = (
    *("../outside.safetensors", "/etc/hostname", "a/../../outside.safetensors", "..", "", ".", "a\0b", 7, None, ["x"]),
)
IN_A_TOKENIZER = (
    *("vocab_file", "tokenizer_file", "fast_tokenizer_files", "chat_template_file", "vocab", "merges", "init_inputs"),
    *("gguf_file", "sp_model_kwargs"),
)
IN_A_DATASET = ("../outside.jsonl", "{root}/outside.jsonl", "x/../../outside.jsonl", "../*.jsonl")
LINKED = ("chat_template.jinja", "vocab.txt", "tokenizer.json", "config.json", "generation_config.json")

# Labels and languages of rows: a path, markup, an order to a terminal. And what of them a card would obey.
IN_ROWS = ("../../escaped", "<script>alert(1)</script>", "[x](javascript:alert(1))", "\x1b[2Jcleared", "| a |\n# b")
OBEYED = ("<script>", "](javascript", "\x1b", "\n# b")


def model_whose_index_names(name: object, root: Path) -> Path:
    """All of its weights lie outside, and its index has this name for one of them."""
    folder = model_in(root / "model")
    (folder / "model.safetensors").rename(root / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {INDEXED: name}}))
    return folder


def model_whose_configuration_names(name: str, root: Path) -> Path:
    """The file of its weights, which transformers reads instead of the other weights in the folder."""
    folder = model_in(root / "model")
    settings = json.loads((folder / "config.json").read_text()) | {"transformers_weights": name}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def model_whose_tokenizer_names(setting: str, root: Path) -> Path:
    """A setting of its tokenizer is the path of a file outside."""
    folder = model_in(root / "model")
    outside = root / "outside.txt"
    outside.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsecret\n")
    path = folder / "tokenizer_config.json"
    named: object = [str(outside)] if setting in ("fast_tokenizer_files", "init_inputs") else str(outside)
    if setting == "sp_model_kwargs":
        named = {"model_file": named}
    settings = json.loads(path.read_text()) | {setting: named, "tokenizer_class": "BertTokenizer"}
    path.write_text(json.dumps(settings))
    return folder


def dataset_that_names(name: str, root: Path) -> Path:
    """Its README names files of rows outside; `{root}` stands for the root."""
    (root / "outside.jsonl").write_text(ROWS)
    folder = root / "data"
    (folder / "x").mkdir(parents=True)
    files = name.format(root=root)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files: {files!r}\n---\n")
    return folder


def model_that_links(name: str, root: Path) -> Path:
    """A file of it is a link to one outside, which can be read as such a file."""
    folder = model_in(root / "model")
    path, outside = folder / name, root / "secret"
    if name == "tokenizer.json":
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_tokens(["secret"])
        tokenizer.save(str(outside))
    elif name.endswith(".json"):
        settings = json.loads(path.read_text()) if path.exists() else {}
        outside.write_text(json.dumps({**settings, "secret": 1}))
    else:
        outside.write_text("secret\n")
    path.unlink(missing_ok=True)
    path.symlink_to("../secret")
    return folder


def rows_whose_language_is(language: str, root: Path) -> Path:
    """A row for an evaluation, whose scores a card tells by language."""
    folder = root / "rows"
    folder.mkdir()
    (folder / "test.jsonl").write_text(json.dumps({"text": "ok", "label": "a", "language": language}))
    return folder
