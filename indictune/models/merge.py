"""Merge an adapter and its base into one model, tensor by tensor."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError

from indictune.config.arguments import ModelArguments
from indictune.config.command_arguments import MergeArguments
from indictune.config.recipe import read_recipe
from indictune.console_text import printable
from indictune.errors import Problems, UserError
from indictune.models.adapter_base import base_of, check_base, find_base
from indictune.models.adapter_deltas import Adapter, read_adapter
from indictune.models.adapters import nf4_config
from indictune.models.atomic_folder import TOKENIZER_FILES, check_free, copy_files, match_config_mode, whole_folder
from indictune.models.load_errors import explained
from indictune.models.merge_sources import Merger, plan, skeleton
from indictune.models.trust import check_links
from indictune.models.weight_files import Checkpoint, weights_files, write_shards


def merge_command(argv: Sequence[str]) -> int:
    """`indictune merge ADAPTER --output_dir D`; returns the exit code.

    Raises:
        UserError: with every problem of the flags, or as `merge`.
    """
    words = list(argv)
    if words and not words[0].startswith("-"):
        words.insert(0, "--adapter")
    recipe = read_recipe(words, (MergeArguments,))
    with recipe.problems.collecting():
        args = recipe.build(MergeArguments)
    recipe.problems.raise_any()
    print(printable(merge(args)))
    return 0


def merge(args: MergeArguments) -> str:
    """Write the merged model to `args.output_dir`, whole or not at all. Returns a line for the user.

    Tensors are read, changed in fp32 and written one by one, so memory holds about one file of the result.

    Raises:
        UserError: the adapter, its base and the flags do not fit together, with every problem.
    """
    output_dir = Path(args.output_dir)
    problems = Problems()
    with problems.collecting():
        check_free(output_dir, "--output_dir")
    with problems.collecting():
        check_links(Path(args.adapter), "--adapter")
        adapter = read_adapter(Path(args.adapter), "--adapter")
    problems.raise_any()
    base_folder = _find_base(args, adapter)
    check_links(base_folder, "--base_model")
    with explained(ModelArguments(str(base_folder)), SafetensorError, flag="--base_model"):
        base = Checkpoint(weights_files(base_folder, "--base_model"))
    with explained(ModelArguments(str(base_folder)), Exception, flag="--base_model"):
        model, settings = skeleton(adapter, base_folder, args.trust_remote_code)
    merger = plan(args, adapter, base, model, settings)
    way_out = "Use a folder on another disk, or --dtype bfloat16."
    with whole_folder(output_dir, "--output_dir", merger.size_bytes(), way_out) as merged:
        unrounded = merged.with_name("unrounded") if args.to_4bit else merged
        _write(merger, base_folder, unrounded, args.max_shard_size)
        if args.to_4bit:
            _write_in_4bit(merger, unrounded, merged, args.max_shard_size)
        match_config_mode(merged)
    form = "4 bit" if args.to_4bit else str(merger.dtype).removeprefix("torch.")
    return f"{output_dir}: {type(model).__name__} in {form}, merged from {args.adapter} and {base_folder}."


def _find_base(args: MergeArguments, adapter: Adapter) -> Path:
    """The folder of the base, at the commit that the adapter was trained on."""
    trained_on = base_of(adapter.folder)
    name = args.base_model or trained_on.name
    if not name:
        raise UserError("base-unknown", "--adapter", adapter.folder)
    check_base(adapter.folder, name, args.base_revision)
    revision = args.base_revision or trained_on.revision
    if revision == trained_on.revision and name == trained_on.name:
        revision = trained_on.commit_hash or revision
    return find_base(name, revision, "--base_model", args.trust_remote_code)


def _write(merger: Merger, base_folder: Path, folder: Path, max_shard_size: str) -> None:
    """Write the merged model, then compare the names and shapes in its files with the plan.

    Raises:
        RuntimeError: they differ.
    """
    folder.mkdir()
    written = Checkpoint(write_shards(folder, merger.expected, merger.value, max_shard_size))
    planned = {name: tuple(tensor.shape) for name, tensor in merger.expected.items()}
    if written.shapes != planned:
        wrong = sorted({*written.shapes.items()} ^ {*planned.items()})
        raise RuntimeError(f"{folder}: the written weights differ from the plan, first {wrong[0]}.")
    merger.model.config.dtype = merger.dtype
    merger.model.config.save_pretrained(folder)
    _copy_description(merger, base_folder, folder)


def _copy_description(merger: Merger, base_folder: Path, folder: Path) -> None:
    """Copy tokenizer, chat template, generation settings and recipe from the adapter, or else from the base."""
    adapter_folder = merger.adapter.folder
    has_tokenizer = any((adapter_folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    copy_files(adapter_folder if has_tokenizer else base_folder, TOKENIZER_FILES, folder)
    if merger.model.can_generate():
        copy_files(base_folder, ["generation_config.json"], folder)
        copy_files(adapter_folder, ["generation_config.json"], folder)
    copy_files(adapter_folder, ["recipe.yaml"], folder)  # `indictune evaluate` reads rows by it
    if "auto_map" in merger.model.config.to_dict():
        copy_files(base_folder, ["*.py"], folder)


def _write_in_4bit(merger: Merger, merged: Path, folder: Path, max_shard_size: str) -> None:
    """Write the merged model again, in 4 bit."""
    print("--to_4bit rounds the merged weights again. Evaluate this model before you use it.", file=sys.stderr)
    settings = merger.rounding.settings if merger.rounding else nf4_config()
    model = type(merger.model).from_pretrained(merged, dtype=merger.dtype, quantization_config=settings)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _copy_description(merger, merged, folder)
