"""Names that come from files stay inside their root, and what a terminal or a card would obey is shown."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, BertConfig, TrainerState

from indictune.checkpoint import store
from indictune.checkpoint.resume import ResumePoint, best_of, check_trusted
from indictune.checkpoint.store import MANIFEST, FileDigest
from indictune.config.arguments import DataArguments, ModelArguments
from indictune.console_text import printable, table
from indictune.data.load_rows import load_splits
from indictune.data.read import hub_datasets
from indictune.errors import UserError
from indictune.hub.publish import published
from indictune.models import builtin
from indictune.models.adapters import base_of
from indictune.models.atomic_folder import TOKENIZER_FILES, copy_model_files
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_classifier, load_classifier_config
from indictune.models.trusted_files import INDEX, is_inside, weights_files
from indictune.tasks.classification import SingleLabel
from indictune.training.callbacks.restore_progress import RestoreProgress
from tests.checkpoint.test_store import write
from tests.faults import hostile
from tests.faults.canaries import model_in
from tests.faults.hostile import ROWS
from tests.models.tiny import words_tokenizer
from tests.ranks.launching import SCRIPT, python, start, torchrun
from tests.refusals import refused


class TestAnIndexOfWeights:
    @pytest.mark.parametrize("name", hostile.IN_AN_INDEX)
    def test_that_names_a_file_elsewhere_is_refused(self, tmp_path: Path, name: object) -> None:
        folder = hostile.model_whose_index_names(name, tmp_path)
        with pytest.raises(UserError, check=lambda error: error.code in ("index-outside-model", "index-unreadable")):
            weights_files(folder, "The base")
        args = ModelArguments(str(folder))
        with pytest.raises(UserError, check=lambda error: error.code in ("index-outside-model", "index-unreadable")):
            load_classifier(args, ["no", "yes"], load_tokenizer(args))

    def test_may_name_files_below_it(self) -> None:
        assert all(map(is_inside, ["model-00001-of-00002.safetensors", "shards/model..1.safetensors"]))


@pytest.mark.more
@pytest.mark.parametrize("make", [hostile.model_whose_index_names, hostile.model_whose_configuration_names])
def test_two_ranks_read_no_weights_elsewhere(tmp_path: Path, make: Callable[[str, Path], Path]) -> None:
    folder, out = make("../outside.safetensors", tmp_path), tmp_path / "out"
    (tmp_path / "rows.jsonl").write_text(ROWS)
    flags = ["--model_name_or_path", str(folder), "--train_file", str(tmp_path / "rows.jsonl")]
    flags += ["--output_dir", str(out), "--global_batch_size", "2", "--per_device_train_batch_size", "1"]
    result = start([*torchrun(2), SCRIPT, *flags, "--save_strategy", "no", "--load_best_model_at_end", "false"])
    assert result.returncode != 0
    status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "user_error", result.stderr
    assert re.search(r"\[(index-outside-model|config-names-weights)\]", status["message"])
    assert "Traceback" not in result.stderr.partition("indictune: ")[0]


class TestAConfiguration:
    @pytest.mark.parametrize(
        "name", ["x.safetensors.index.json", "../x.safetensors", "adapter_model.bin", "model.bin"]
    )
    def test_that_names_the_file_of_its_weights_is_refused(self, tmp_path: Path, name: str) -> None:
        """transformers 5.23 reads a pickle by it, and an index that leads out, whatever else is there."""
        args = ModelArguments(str(hostile.model_whose_configuration_names(name, tmp_path)))
        with refused("config-names-weights", repr(name)):
            load_classifier_config(args)
        with refused("config-names-weights", repr(name)):
            load_classifier(args, ["no", "yes"], load_tokenizer(args))

    def test_is_heeded_by_transformers(self, tmp_path: Path) -> None:
        """If this fails, `check_weights_setting` can go."""
        folder = hostile.model_whose_configuration_names("other.safetensors", tmp_path)
        weights = load_file(folder / "model.safetensors")
        save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, folder / "other.safetensors")
        model = AutoModel.from_pretrained(folder)
        assert not model.embeddings.word_embeddings.weight.any()


class TestATokenizer:
    @pytest.mark.parametrize("setting", hostile.IN_A_TOKENIZER)
    def test_reads_no_file_elsewhere(self, tmp_path: Path, setting: str) -> None:
        folder = hostile.model_whose_tokenizer_names(setting, tmp_path)
        for has_its_own in (True, False):
            if not has_its_own:
                (folder / "tokenizer.json").unlink()
            with suppress(UserError):  # or it is read without them
                assert "secret" not in load_tokenizer(ModelArguments(str(folder))).get_vocab()

    @pytest.mark.parametrize("setting", sorted({*hostile.IN_A_TOKENIZER} - {"tokenizer_file"}))
    @pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
    def test_that_names_one_is_refused(self, tmp_path: Path, file: str, setting: str) -> None:
        folder = hostile.model_whose_tokenizer_names(setting, tmp_path)
        (folder / "tokenizer_config.json").rename(folder / file)
        with refused("tokenizer-file-outside-model", f"{file} has {setting} ", "outside.txt"):
            load_tokenizer(ModelArguments(str(folder)))

    def test_whose_special_tokens_name_one_is_refused_where_the_settings_would_not_be_read(
        self, tmp_path: Path
    ) -> None:
        """What that file says goes over the files that transformers has found."""
        folder = hostile.model_whose_tokenizer_names("tokenizer_file", tmp_path)
        (folder / "tokenizer_config.json").rename(folder / "special_tokens_map.json")
        with refused("tokenizer-file-outside-model", "special_tokens_map.json has tokenizer_file "):
            load_tokenizer(ModelArguments(str(folder)))

    def test_that_names_one_from_the_current_folder_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = hostile.model_whose_tokenizer_names("vocab", tmp_path)
        monkeypatch.chdir(tmp_path)
        for setting, name in (("vocab", "outside.txt"), ("gguf_file", "../outside.txt"), ("x", "./outside.txt")):
            (folder / "tokenizer_config.json").write_text(json.dumps({setting: name}))
            with refused("tokenizer-file-outside-model", f"has {setting} "):
                load_tokenizer(ModelArguments(str(folder)))

    def test_whose_special_tokens_name_one_of_the_current_folder_alone_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = hostile.model_whose_tokenizer_names("vocab", tmp_path)
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
        (folder / "special_tokens_map.json").write_text('{"vocab_file": "outside.txt"}')
        monkeypatch.chdir(tmp_path)
        with refused("tokenizer-file-outside-model", "special_tokens_map.json has vocab_file 'outside.txt'"):
            load_tokenizer(ModelArguments(str(folder)))
        assert "secret" in AutoTokenizer.from_pretrained(folder).get_vocab()  # or transformers has mended it

    def test_that_names_its_own_file_is_read_despite_one_in_the_current_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = hostile.model_whose_tokenizer_names("vocab", tmp_path)
        (folder / "tokenizer_config.json").write_text('{"vocab_file": "vocab.txt"}')
        for place in (tmp_path, folder):
            (place / "vocab.txt").write_text("a")
        monkeypatch.chdir(tmp_path)
        assert "secret" not in load_tokenizer(ModelArguments(str(folder))).get_vocab()

    def test_that_names_one_on_the_hub_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        folder = hostile.model_whose_tokenizer_names("vocab", tmp_path)
        snapshot = cached(tmp_path, "evil/model")
        snapshot.parent.mkdir()
        folder.rename(snapshot)
        with refused("tokenizer-file-outside-model", "evil/model", "tokenizer_config.json has vocab '"):
            load_tokenizer(ModelArguments("evil/model"))

    def test_that_was_published_with_its_authors_paths_is_read(self, tmp_path: Path) -> None:
        folder = hostile.model_whose_tokenizer_names("tokenizer_file", tmp_path)
        path = folder / "tokenizer_config.json"
        theirs = {
            "vocab_file": "/home/author/bert/vocab.txt",
            "special_tokens_map_file": "/root/.cache/huggingface/transformers/0f.1a",
            "name_or_path": __file__,
            "init_inputs": [],
            "additional_special_tokens": ["/", "</x>"],
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | theirs))
        tokenizer = load_tokenizer(ModelArguments(str(folder)))
        assert len(tokenizer.get_vocab()) > 1000
        assert "secret" not in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("file", "setting"),
    [
        ("tokenizer_config.json", "vocab"),
        ("tokenizer_config.json", "init_inputs"),
        ("special_tokens_map.json", "vocab"),
    ],
)
def test_a_tokenizer_of_transformers_reads_a_file_elsewhere(tmp_path: Path, file: str, setting: str) -> None:
    """What is refused above: where this fails, transformers or tokenizers has mended it (5.23, 0.23 have not)."""
    folder = hostile.model_whose_tokenizer_names(setting, tmp_path)
    (folder / "tokenizer.json").unlink()
    if file == "special_tokens_map.json":
        (folder / "tokenizer_config.json").rename(folder / file)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert "secret" in AutoTokenizer.from_pretrained(folder).get_vocab()


class TestAManifest:
    @pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../outside", "\0", ""])
    def test_that_names_a_file_elsewhere_is_damage(self, tmp_path: Path, name: str) -> None:
        folder = write(tmp_path / "out", 4)
        (tmp_path / "outside").write_text("")
        manifest = store.read_manifest(folder)
        assert manifest is not None
        files = {**manifest.files, name: FileDigest(0, store.file_digest(tmp_path / "outside").sha256)}
        (folder / MANIFEST).write_text(replace(manifest, files=files).to_json())
        assert store.damage(folder) == [f"{folder / name} is missing"]

    @pytest.mark.parametrize("step", ["x/../../../escaped", -1, "4", 4.0, True, None])
    def test_whose_step_is_no_number_counts_for_nothing(self, tmp_path: Path, step: object) -> None:
        out = tmp_path / "a" / "out"
        replaced = write(out, 4).rename(out / ".replaced-checkpoint")
        manifest = store.read_manifest(replaced)
        assert manifest is not None
        (replaced / MANIFEST).write_text(replace(manifest, step=cast(int, step)).to_json())
        assert store.read_manifest(replaced) is None
        (out / "checkpoint-x").mkdir()
        store.remove_leftovers(out)
        assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", out, out / "checkpoint-x"]


class TestAState:
    def best(self, out: Path, named: object) -> Path | None:
        return best_of(write(out, 8, state={"best_model_checkpoint": named}))

    def test_has_the_best_checkpoint_that_it_names(self, tmp_path: Path) -> None:
        assert self.best(tmp_path, "checkpoint-4") == tmp_path / "checkpoint-4"

    @pytest.mark.parametrize("named", ["/somewhere/checkpoint-4", "../outside/checkpoint-4"])
    def test_has_its_best_checkpoint_in_the_run_wherever_it_says(self, tmp_path: Path, named: str) -> None:
        assert self.best(tmp_path, named) == tmp_path / "checkpoint-4"

    @pytest.mark.parametrize(
        "named", ["x/../../outside", "checkpoint-x", "checkpoint--4", "checkpoint-4\0", "", 4, ["checkpoint-4"], None]
    )
    def test_that_names_no_checkpoint_has_none(self, tmp_path: Path, named: object) -> None:
        (tmp_path / "checkpoint-x").mkdir()
        assert self.best(tmp_path, named) is None

    def test_that_is_no_object_has_none(self, tmp_path: Path) -> None:
        (write(tmp_path, 8) / "trainer_state.json").write_text("[]", encoding="utf-8")
        assert best_of(tmp_path / "checkpoint-8") is None

    @pytest.mark.parametrize("step", ["x/../../outside/checkpoint-4", 4.5, True, ["4"]])
    def test_whose_best_step_is_no_number_has_none(self, tmp_path: Path, step: Any) -> None:
        state = TrainerState(best_global_step=step)
        point = ResumePoint(write(tmp_path, 8))
        RestoreProgress(MagicMock(), point)._restore_best(state, ends_with_best=True)
        assert state.best_global_step is None

    def test_whose_best_checkpoint_is_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "checkpoint-4").symlink_to(write(tmp_path / "outside", 4))
        best = self.best(tmp_path / "out", "checkpoint-4")
        assert best is not None
        with pytest.raises(UserError, match="is not in this run's"):
            check_trusted(best, tmp_path / "out", trust_checkpoint=False)


class TestADataset:
    @pytest.mark.parametrize("name", hostile.IN_A_DATASET)
    def test_that_names_files_elsewhere_is_refused(self, tmp_path: Path, name: str) -> None:
        folder = hostile.dataset_that_names(name, tmp_path)
        with pytest.raises(UserError, match=r"its README\.md names .*outside"):
            load_splits(DataArguments(dataset_name=str(folder)))

    def test_that_names_a_file_of_its_own_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: a/t.jsonl\n---\n")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "t.jsonl").write_text(ROWS)
        assert load_splits(DataArguments(dataset_name=str(tmp_path))).labels == ["a", "b"]

    @pytest.mark.parametrize(
        "file",
        [
            *(
                "https://example.org/t.csv",
                "hf://datasets/other/tweets@0f/t.csv",
                "hf://datasets/me/tweets@0f/../t.csv",
            ),
            *("/etc/hostname", "hf://datasets/me/tweets2@0f/t.csv"),
        ],
    )
    def test_on_the_hub_that_names_files_elsewhere_is_refused(self, file: str) -> None:
        hub_datasets._check_files("me/tweets", {"train": ["hf://datasets/me/tweets@0f/data/t.csv"]})
        with pytest.raises(UserError, match="outside the dataset"):
            hub_datasets._check_files("me/tweets", {"train": [file]})


class TestAnAdapter:
    @pytest.mark.parametrize("name", ["a\0b", 7, ["x"], {"a": 1}])
    @pytest.mark.parametrize("file", ["base_model.json", "adapter_config.json"])
    def test_whose_base_is_no_name_is_refused(self, tmp_path: Path, file: str, name: object) -> None:
        key = "name" if file == "base_model.json" else "base_model_name_or_path"
        (tmp_path / file).write_text(json.dumps({key: name, "revision": "main"}))
        with refused("base-record-unreadable"):
            base_of(tmp_path)

    @pytest.mark.parametrize("text", ["[]", "{", '{"name": "x", "revision": "main", "__class__": 1}', "null"])
    def test_whose_record_is_broken_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "base_model.json").write_text(text)
        with refused("base-record-unreadable"):
            base_of(tmp_path)


class TestLinks:
    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Path]:
        (tmp_path / "target").mkdir()
        yield tmp_path / "target"
        assert not any("secret" in path.read_text() for path in (tmp_path / "target").iterdir())

    def test_out_of_an_adapter_are_not_copied_into_a_merged_model(self, tmp_path: Path, target: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "tokenizer.json").symlink_to("../secret")
        (tmp_path / "adapter" / "vocab.txt").write_text("words")
        copy_model_files(tmp_path / "adapter", TOKENIZER_FILES, target)
        assert [path.name for path in target.iterdir()] == ["vocab.txt"]

    def test_of_the_hubs_cache_are(self, tmp_path: Path, target: Path) -> None:
        repository = tmp_path / "models--me--model"
        (repository / "blobs").mkdir(parents=True)
        (repository / "blobs" / "0f").write_text("words")
        snapshot = repository / "snapshots" / "commit"
        snapshot.mkdir(parents=True)
        (snapshot / "vocab.txt").symlink_to("../../blobs/0f")
        copy_model_files(snapshot, TOKENIZER_FILES, target)
        assert (target / "vocab.txt").read_text() == "words"


def vocabularies() -> list[str]:
    """What the tokenizers of transformers call the files that they read and save."""
    folder = Path(str(transformers.__file__)).parent
    found = {"tokenizer.json", "tokenizer.model"}  # of the class of most of them
    for path in folder.glob("models/*/tokenization_*.py"):
        for files in re.findall(
            r"^VOCAB_FILES_NAMES = {(.*?)}", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            found.update(re.findall(r': "([^"]+)"', files))
    return sorted(found)


class TestVocabularies:
    """Each name that a tokenizer of transformers may give to one."""

    def test_are_looked_for_where_they_are(self) -> None:
        assert len(vocabularies()) > 20
        assert {"bpe.codes", "source.spm", "prophetnet.tokenizer"} <= {*vocabularies()}

    @pytest.mark.parametrize("name", vocabularies())
    def test_that_are_links_out_of_a_model_are_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "secret").write_text("secret")
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / name).symlink_to("../secret")
        with refused("link-outside-model", f"{name} ("):
            load_tokenizer(ModelArguments(str(tmp_path / "model")))

    @pytest.mark.parametrize("name", vocabularies())
    def test_are_pushed_and_copied(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "copy").mkdir()
        (tmp_path / name).touch()
        assert published(tmp_path, [name]) == [name]
        copy_model_files(tmp_path, TOKENIZER_FILES, tmp_path / "copy")
        assert (tmp_path / "copy" / name).is_file()

    def test_of_phobert_come_back_as_they_were(self, tmp_path: Path) -> None:
        """Its tokenizer reads any text as `bpe.codes`, and copies that file when it is saved."""
        folder = model_in(tmp_path / "model")
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PhobertTokenizer"}')
        (folder / "vocab.txt").write_text("wor@@ 1\nds 1\n")
        (folder / "bpe.codes").write_text("w o 1\nwo r 1\nd s</w> 1\n")
        tokenizer = load_tokenizer(ModelArguments(str(folder)))
        saved = [Path(path).name for path in tokenizer.save_pretrained(tmp_path / "saved")]
        shutil.copy(folder / "config.json", tmp_path / "saved")
        for name in set(saved) - set(published(tmp_path / "saved", saved)):
            (tmp_path / "saved" / name).unlink()
        again = load_tokenizer(ModelArguments(str(tmp_path / "saved")))
        assert again("words")["input_ids"] == tokenizer("words")["input_ids"] == [0, 4, 5, 2]


class TestLinksInAModel:
    @pytest.mark.parametrize("name", hostile.LINKED)
    def test_that_lead_out_of_it_are_refused(self, tmp_path: Path, name: str) -> None:
        folder = hostile.model_that_links(name, tmp_path)
        for read in (load_classifier_config, load_tokenizer):
            with refused("link-outside-model", f"{name} (", "/secret)"):
                read(ModelArguments(str(folder)))

    def test_that_lead_to_templates_elsewhere_are_refused(self, tmp_path: Path) -> None:
        folder = model_in(tmp_path / "model")
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "tool.jinja").write_text("secret")
        (folder / "additional_chat_templates").symlink_to("../elsewhere")
        with pytest.raises(UserError, match="additional_chat_templates"):
            load_tokenizer(ModelArguments(str(folder)))

    def test_that_stay_in_it_or_lead_to_weights_or_nowhere_are_not(self, tmp_path: Path) -> None:
        folder = model_in(tmp_path / "model")
        (folder / "model.safetensors").rename(tmp_path / "weights")
        for name in ("model.safetensors", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack"):
            (folder / name).symlink_to("../weights")
        (folder / "tokenizer.json").rename(folder / "words")
        (folder / "tokenizer.json").symlink_to("words")
        (folder / "notes.txt").symlink_to("notes.txt")
        (tmp_path / "linked").symlink_to(folder)
        args = ModelArguments(str(tmp_path / "linked"))
        load_classifier(args, ["no", "yes"], load_tokenizer(args))

    @pytest.mark.parametrize(
        ("repository", "target"),
        [
            ("work", "secret"),
            ("work", "blobs/secret"),
            ("models--me--model", "secret"),
            ("models--me--model", "snapshots/other/secret"),
            ("models--me--model", "blobs/../secret"),
        ],
    )
    def test_out_of_a_folder_that_is_named_like_the_hubs_cache_are_refused(
        self, tmp_path: Path, repository: str, target: str
    ) -> None:
        """Whoever packs an archive chooses the names of its folders."""
        folder = model_in(tmp_path / repository / "snapshots" / "commit")
        secret = tmp_path / repository / target
        for parent in (secret.parent, tmp_path / repository / "blobs"):
            parent.mkdir(parents=True, exist_ok=True)
        secret.write_text("secret")
        (folder / "vocab.txt").symlink_to(f"../../{target}")
        with refused("link-outside-model", "vocab.txt (", "/secret)"):
            load_tokenizer(ModelArguments(str(folder)))
        (tmp_path / "merged").mkdir()
        copy_model_files(folder, ["vocab.txt"], tmp_path / "merged")
        assert not any((tmp_path / "merged").iterdir())

    def test_are_those_of_the_hubs_cache(self, tmp_path: Path) -> None:
        snapshot = model_in(tmp_path / "models--me--model" / "snapshots" / "commit")
        (tmp_path / "models--me--model" / "blobs").mkdir()
        for number, path in enumerate(sorted(snapshot.iterdir())):
            path.rename(tmp_path / "models--me--model" / "blobs" / str(number))
            path.symlink_to(f"../../blobs/{number}")
        args = ModelArguments(str(snapshot))
        load_classifier(args, ["no", "yes"], load_tokenizer(args))


def cached(hub_cache: Path, name: str) -> Path:
    """The folder of a model in a cache of the Hub, as if it had been fetched: without files yet."""
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def test_a_hub_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    snapshot = model_in(cached(tmp_path, "evil/model"))
    (snapshot / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"bert.pooler.dense.weight": "../../../outside.safetensors"}}
    (snapshot / INDEX).write_text(json.dumps(index))
    args = ModelArguments("evil/model")
    with refused("index-outside-model", "evil/model", "outside.safet"):
        load_classifier(args, ["no", "yes"], load_tokenizer(args))


@pytest.mark.parametrize("name", ["builtin:../../etc", "builtin:", "builtin:/etc", "builtin:tiny-indic-bert/../x"])
def test_a_built_in_name_is_one_of_the_list(name: str) -> None:
    with refused("no-such-name"):
        builtin.resolve(name)
    with pytest.raises(UserError, match="no such built-in dataset"):
        load_splits(DataArguments(dataset_name=name))


@pytest.mark.parametrize("name", ["../../x", "a\0b", "/nowhere", "-", "https://example.org/model"])
def test_a_model_by_any_name_is_one_problem(name: str) -> None:
    with pytest.raises(UserError) as caught:
        load_classifier_config(ModelArguments(name))
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\x00b\x07", "a\\x00b\\x07"),
        ("a\rb", "a\\rb"),
        ("\u202eevil", "\\u202eevil"),
        ("\x9b31m", "\\x9b31m"),
        ("क्‍ष, రు\u200cప, 😍", "क्‍ष, రు\u200cప, 😍"),
    ],
)
def test_a_terminal_gets_no_orders_from_texts(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert shown in table(["label"], [[text]])


class TestACommand:
    """Started as its user does: what it prints goes through no console of a run."""

    ORDER = "\x1b]0;PWNED\x07"
    SHOWN = "\\x1b]0;PWNED\\x07"

    def output(self, code: int, *words: str) -> str:
        """Standard output and error, in which the order is shown and not given."""
        result = start([*python(), "indictune/__main__.py", *words])
        said = result.stdout + result.stderr
        assert result.returncode == code, said
        assert "PWNED" in said
        assert self.SHOWN in said
        assert not set("\x1b\x07") & set(said)
        return said

    @pytest.mark.more
    def test_that_prepares_rows_shows_the_labels(self, tmp_path: Path) -> None:
        rows = [{"text": f"{label} {index}", "label": label} for index in range(3) for label in ("a", self.ORDER)]
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "train.jsonl").write_text("".join(lines))
        (tmp_path / "only_a.jsonl").write_text(lines[0] + json.dumps({"text": "b", "label": "b"}) + "\n")
        (tmp_path / "validation.jsonl").write_text(lines[1])
        assert "labels: " in self.output(0, "prepare", "--train_file", str(tmp_path / "train.jsonl"))
        other = ("--validation_file", str(tmp_path / "validation.jsonl"))
        assert "indictune: " in self.output(2, "prepare", "--train_file", str(tmp_path / "only_a.jsonl"), *other)

    @pytest.mark.more
    def test_that_prepares_rows_gives_no_label_a_line_of_its_own(self, tmp_path: Path) -> None:
        forged = "indictune: all is well"
        rows = [{"text": f"{index}", "label": label} for index, label in enumerate(("a", f"x\n{forged}"))]
        lines = [json.dumps(row) + "\n" for row in rows]
        (tmp_path / "train.jsonl").write_text("".join(lines))
        (tmp_path / "only_a.jsonl").write_text(lines[0] + json.dumps({"text": "b", "label": "b"}) + "\n")
        (tmp_path / "validation.jsonl").write_text(lines[1])
        for split, code in (("train", 0), ("only_a", 2)):
            files = ("--train_file", tmp_path / f"{split}.jsonl", "--validation_file", tmp_path / "validation.jsonl")
            result = start([*python(), "indictune/__main__.py", "prepare", *map(str, files)])
            assert result.returncode == code, result.stderr
            assert f"x {forged[:12]}" in result.stderr
            assert not any(line.startswith(forged) for line in (result.stdout + result.stderr).splitlines())

    def test_that_lists_checkpoints_shows_the_names_of_files(self, tmp_path: Path) -> None:
        checkpoint = write(tmp_path, 4)
        manifest = store.read_manifest(checkpoint)
        assert manifest is not None
        name = f"{self.ORDER}\nindictune: all is well"
        named = replace(manifest, files={**manifest.files, name: FileDigest(1, "0" * 64)})
        (checkpoint / MANIFEST).write_text(named.to_json())
        output = self.output(1, "checkpoint", str(tmp_path))
        assert "damaged: " in output
        assert "\nindictune: all is well" not in output

    def test_that_merges_shows_the_name_of_the_base(self, tmp_path: Path) -> None:
        config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": f"./{self.ORDER}"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        weights = {f"base_model.model.query.lora_{part}.weight": torch.ones(1, 1) for part in "AB"}
        save_file(weights, tmp_path / "adapter_model.safetensors")
        self.output(2, "merge", str(tmp_path), "--output_dir", str(tmp_path / "out"))


@pytest.mark.more
def test_a_run_that_shows_the_libraries_messages_too_gives_no_orders(tmp_path: Path) -> None:
    """Which come through a handler of their own, and ours with them."""
    for split, number in (("train", 4), ("validation", 2)):
        rows = [{"text": f"{split} {index}", "label": f"{TestACommand.ORDER}{index % 2}"} for index in range(number)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [f"--{split}_file={tmp_path / split}.jsonl" for split in ("train", "validation")]
    sizes = ("--global_batch_size", "4", "--per_device_train_batch_size", "4", "--max_steps", "1")
    result = start([*python(), SCRIPT, *files, *sizes, "--output_dir", str(tmp_path / "out"), "--verbose"])
    assert result.returncode == 0, result.stderr
    assert TestACommand.SHOWN in result.stderr
    assert "\x07" not in result.stdout + result.stderr  # transformers colours what it says


@pytest.mark.more
@pytest.mark.parametrize(("rule", "code"), [("stop", 2), ("quarantine", 0)])
def test_a_file_name_that_is_not_utf_8_is_reported(tmp_path: Path, rule: str, code: int) -> None:
    path, out = tmp_path / os.fsdecode(b"caf\xe9.jsonl"), tmp_path / "out"
    path.write_text(ROWS * 2 + '{"text": \n')
    flags = ["--train_file", str(path), "--bad_rows", rule, "--output_dir", str(out), "--max_steps", "1"]
    share = ["--max_bad_fraction", "0.5"] if rule == "quarantine" else []
    result = start([*python(), SCRIPT, *flags, *share, "--global_batch_size", "8"])
    assert result.returncode == code, result.stderr
    assert "caf\\udce9.jsonl" in result.stderr
    status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    assert code == 0 or "caf\\udce9.jsonl" in status["message"]
    assert not list(out.glob(".status.json*"))
    log = (out / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert code == 2 or "caf\\udce9.jsonl: 1 bad rows" in log
    assert "UnicodeEncodeError" not in log


def test_a_label_of_two_lines_is_one_row_of_a_table() -> None:
    assert len(table(["label"], [["a\nb\tc"]]).splitlines()) == 3


@pytest.mark.parametrize(
    "language", ["<img src=x>", "[a](javascript:b)", "| a |", "`a`", "a\n---\n# b", "a\0b", "a: [b"]
)
def test_a_language_is_no_markup_in_what_the_trainer_writes(language: str) -> None:
    names = flat_names([language], [language])
    assert len(names) == 2
    assert not {letter for name in names for letter in name} & set("<>[]()|`\n\0:#")


def test_ordinary_languages_keep_their_names() -> None:
    languages = ("hi", "te-Telu", "हिन्दी", "und", "zh_CN.a")
    assert flat_names(languages, []) == {f"macro_f1_{language}" for language in languages}


def flat_names(languages: Sequence[str], labels: Sequence[str]) -> set[str]:
    """What the Trainer calls the scores of these languages and labels."""
    of_all = dict.fromkeys(("loss", "accuracy", "macro_f1", "worst_language_macro_f1", "ece"), 0.5)
    scores = {"per_language": {language: {"macro_f1": 0.5} for language in languages}}
    scores |= {"per_label": {label: {"f1": 0.5} for label in labels}}
    config = BertConfig(vocab_size=64, id2label={0: "a", 1: "b"})
    return SingleLabel(config, words_tokenizer()).flatten(of_all | scores).keys() - of_all.keys()
