"""A payload in every file that is read: none runs without a flag that trusts it, and nothing asks at a prompt."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from indictune.checkpoint import store
from indictune.checkpoint.store import MANIFEST
from indictune.cli import main
from indictune.commands.merge import MergeFlags, merge_adapter
from indictune.config.arguments import DataArguments, ModelArguments
from indictune.data.load_rows import load_splits
from indictune.errors import UserError
from indictune.models.load import load_tokenizer, load_trained
from indictune.models.task_models import load_classifier, load_classifier_config
from tests.conftest import FinishedRun
from tests.faults.canaries import PICKLES, Canary, model_in
from tests.faults.runs import EXIT_RESUMABLE, STEP, Job
from tests.ranks.launching import SCRIPT, accelerate, python, start
from tests.refusals import refused

Tamper = Callable[[Path, Canary], None]

# Settings of an adapter that is not LoRA (peft 0.21): it begins with the numbers of a file.
FROM_A_FILE = {
    "prompt_tuning_init": "EXACT_SOURCE_TASK",
    "prompt_tuning_init_state_dict_path": "canary.pt",
    "num_virtual_tokens": 1,
    "num_transformer_submodules": 1,
}


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "ran")


@pytest.fixture(autouse=True)
def _nothing_asks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked: list[str] = []

    def answer(prompt: str = "") -> str:
        asked.append(prompt)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield
    assert asked == []


def test_a_canary_runs_where_a_pickle_is_read(canary: Canary, tmp_path: Path) -> None:
    for write, read in ((canary.pickled, unpickle), (canary.saved, unpickle_with_torch)):
        write(tmp_path / "file")
        read(tmp_path / "file")
        assert canary.ran.exists()
        canary.ran.unlink()


def unpickle(path: Path) -> None:
    pickle.loads(path.read_bytes())


def unpickle_with_torch(path: Path) -> None:
    torch.load(path, weights_only=False)


def edited(path: Path, **changes: object) -> None:
    """Change some keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def only_a_bin(folder: Path, canary: Canary) -> None:
    (folder / "model.safetensors").unlink()
    canary.saved(folder / "pytorch_model.bin")


def only_bins_in_shards(folder: Path, canary: Canary) -> None:
    (folder / "model.safetensors").unlink()
    canary.saved(folder / "pytorch_model-00001-of-00001.bin")
    index = {"metadata": {}, "weight_map": {"classifier.weight": "pytorch_model-00001-of-00001.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def weights_that_are_a_pickle(folder: Path, canary: Canary) -> None:
    canary.saved(folder / "model.safetensors")


def pickles_beside(folder: Path, canary: Canary) -> None:
    for name in PICKLES:
        canary.saved(folder / name)


def code_of_an_unknown_type(folder: Path, canary: Canary) -> None:
    (folder / "evil.py").write_text(canary.python + "class Config: pass\n")
    edited(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})


def code_of_a_known_type(folder: Path, canary: Canary) -> None:
    (folder / "evil.py").write_text(canary.python + "class Evil: pass\n")
    classes = ("AutoConfig", "AutoModel", "AutoModelForSequenceClassification", "AutoTokenizer")
    edited(folder / "config.json", auto_map=dict.fromkeys(classes, "evil.Evil"))


def code_of_a_known_class(folder: Path, canary: Canary) -> None:
    (folder / "evil.py").write_text(canary.python + "class BertModel: pass\n")
    edited(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.BertModel"})


def code_of_a_tokenizer(folder: Path, canary: Canary) -> None:
    (folder / "evil.py").write_text(canary.python + "class Evil: pass\n")
    edited(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})


def code_of_a_tokenizer_that_is_unknown(folder: Path, canary: Canary) -> None:
    code_of_a_tokenizer(folder, canary)
    edited(folder / "tokenizer_config.json", tokenizer_class="Evil")
    (folder / "tokenizer.json").unlink()


def a_tokenizer_that_is_a_pickle(folder: Path, canary: Canary) -> None:
    for name in ("tokenizer.json", "vocab.txt", "tokenizer.model", "added_tokens.json", "special_tokens_map.json"):
        canary.pickled(folder / name)


def a_configuration_that_is_a_pickle(folder: Path, canary: Canary) -> None:
    canary.pickled(folder / "config.json")


class TestAForeignModel:
    @pytest.mark.parametrize(
        ("tamper", "code"),
        [
            (only_a_bin, "pickle-refused"),
            (only_bins_in_shards, "pickle-refused"),
            (weights_that_are_a_pickle, "model-unreadable"),
            (pickles_beside, None),
            (code_of_an_unknown_type, "model-needs-its-code"),
            (code_of_a_known_type, "model-means-its-code"),
            (code_of_a_known_class, None),
            (code_of_a_tokenizer, None),
            (code_of_a_tokenizer_that_is_unknown, "model-unreadable model-needs-its-code"),
            (a_tokenizer_that_is_a_pickle, "model-unreadable"),
            (a_configuration_that_is_a_pickle, "model-unreadable"),
        ],
    )
    def test_is_read_without_its_code_or_refused(
        self, tmp_path: Path, canary: Canary, tamper: Tamper, code: str | None
    ) -> None:
        folder = model_in(tmp_path / "model")
        tamper(folder, canary)
        args = ModelArguments(str(folder))
        found: list[str] = []
        try:
            load_classifier_config(args)
            load_classifier(args, ["no", "yes"], load_tokenizer(args))
        except UserError as error:
            found = [each.code for each in error.problems]
        assert found in ([[]] if code is None else [[each] for each in code.split()])
        assert not canary.ran.exists()

    def test_runs_its_code_where_it_is_trusted(self, tmp_path: Path, canary: Canary) -> None:
        folder = model_in(tmp_path / "model")
        code_of_an_unknown_type(folder, canary)
        with pytest.raises(Exception):  # noqa: B017, PT011  (its class is none)
            load_classifier_config(ModelArguments(str(folder), trust_remote_code=True))
        assert canary.ran.exists()

    @pytest.mark.parametrize("is_zip", [True, False])
    def test_of_tensors_in_a_bin_is_read(self, tmp_path: Path, is_zip: bool) -> None:
        folder = model_in(tmp_path / "model")
        args = ModelArguments(str(folder))
        model = load_classifier(args, ["no", "yes"], load_tokenizer(args))
        torch.save(model.state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        (folder / "model.safetensors").unlink()
        found = load_classifier(args, ["no", "yes"], load_tokenizer(args)).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())

    @pytest.mark.more
    def test_of_tensors_in_a_bin_is_the_base_of_an_adapter(self, finished_run: FinishedRun, tmp_path: Path) -> None:
        """By the run, which reads its adapter again, and by what evaluates that."""
        base, folder = model_in(tmp_path / "model"), tmp_path / "out"
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
        flags = (
            "--model_name_or_path",
            str(base),
            "--method",
            "lora",
            "--max_steps",
            "2",
            "--output_dir",
            str(folder),
        )
        result = start([*python(), SCRIPT, "--config", str(finished_run.recipe), *flags])
        assert result.returncode == 0, result.stderr
        assert (folder / "adapter_model.safetensors").is_file()
        test_file = finished_run.recipe.parent / "test.jsonl"
        command = ("evaluate", "--model", str(folder), "--test_file", str(test_file))
        evaluated = subprocess_of(*command)
        assert evaluated.returncode == 0, evaluated.stderr
        block = json.loads((folder / "evaluation/test/metrics.json").read_text())["test"]
        assert block == json.loads((folder / "metrics.json").read_text())["test"]

    @pytest.mark.parametrize("tamper", [only_a_bin, code_of_an_unknown_type])
    def test_ends_the_script_with_one_message(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary, tamper: Tamper
    ) -> None:
        folder = model_in(tmp_path / "model")
        tamper(folder, canary)
        flags = ["--model_name_or_path", str(folder), "--output_dir", str(tmp_path / "out")]
        result = start([*python(), SCRIPT, "--config", str(finished_run.recipe), *flags])
        assert result.returncode == 2, result.stderr
        (message,) = [line for line in result.stderr.splitlines() if line.startswith("indictune:")]
        assert f"--model_name_or_path {folder}: " in message
        assert "Traceback" not in result.stderr
        assert not canary.ran.exists()

    def test_is_refused_by_prepare(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = model_in(tmp_path / "model")
        code_of_an_unknown_type(folder, canary)
        assert main(["prepare", "--config", str(finished_run.recipe), "--model_name_or_path", str(folder)]) == 2
        assert "--trust_remote_code true" in capsys.readouterr().err
        assert not canary.ran.exists()


class TestARecipe:
    """That somebody else wrote, and that trusts its author's code."""

    @pytest.fixture
    def foreign(self, finished_run: FinishedRun, tmp_path: Path, canary: Canary) -> Path:
        """Of a run on a model whose code is a canary."""
        folder = model_in(tmp_path / "model")
        code_of_an_unknown_type(folder, canary)
        content = yaml.safe_load(finished_run.recipe.read_text())
        recipe = tmp_path / "downloaded" / "recipe.yaml"
        recipe.parent.mkdir()
        recipe.write_text(yaml.safe_dump({**content, "model_name_or_path": str(folder), "trust_remote_code": True}))
        return recipe

    def test_is_refused_by_a_run_and_by_prepare(self, foreign: Path, tmp_path: Path, canary: Canary) -> None:
        run = start([*python(), SCRIPT, "--config", str(foreign), "--output_dir", str(tmp_path / "out")])
        prepared = subprocess_of("prepare", "--config", str(foreign))
        for result in (run, prepared):
            assert result.returncode == 2, result.stderr
            assert f"{foreign}: trust_remote_code: " in result.stderr
        assert not canary.ran.exists()

    def test_is_refused_by_every_other_command(self, foreign: Path, tmp_path: Path, canary: Canary) -> None:
        (foreign.parent / "own.yaml").write_text("trust_remote_code: true\ntrust_checkpoint: true\n")
        config = ("--config", str(foreign.parent / "own.yaml"), "--output_dir", str(tmp_path / "out"))
        (tmp_path / "model/adapter_config.json").write_text("{}")
        (rows := tmp_path / "t.csv").write_text("text,label\na,b\n")
        for verb, flags in (
            ("evaluate", ("--model", str(tmp_path / "model"), "--test_file", str(rows), *config)),
            ("merge", (str(tmp_path / "model"), *config)),
            ("checkpoint", (str(tmp_path / "model"), *config[:2])),
        ):
            result = subprocess_of(verb, *flags)
            assert result.returncode == 2, result.stderr
            assert "[trust-in-file]" in result.stderr
        assert not canary.ran.exists()


class TestAFinishedModel:
    def test_whose_own_recipe_trusts_its_code_does_not_run_it(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary
    ) -> None:
        folder = tmp_path / "model"
        shutil.copytree(finished_run.folder, folder)
        (folder / "evil.py").write_text(canary.python + "class Config: pass\n")
        edited(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
        recipe = folder / "recipe.yaml"
        recipe.write_text(recipe.read_text() + "trust_remote_code: true\n")
        test_file = finished_run.recipe.parent / "test.jsonl"
        flags = ["--model", str(folder), "--test_file", str(test_file), "--output_dir", str(tmp_path / "out")]
        result = subprocess_of("evaluate", *flags)
        assert result.returncode == 2, result.stderr
        assert "--trust_remote_code true" in result.stderr
        assert "Traceback" not in result.stderr
        assert not canary.ran.exists()

    def test_that_is_an_adapter_in_a_bin_is_refused(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary
    ) -> None:
        adapter = adapter_in(tmp_path / "adapter", finished_run.folder, canary)
        with refused("adapter-pickled"):
            load_trained(adapter)
        assert not canary.ran.exists()

    def test_that_is_an_adapter_in_a_bin_is_not_merged(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary
    ) -> None:
        adapter = adapter_in(tmp_path / "adapter", finished_run.folder, canary)
        with refused("adapter-pickled"):
            merge_adapter(MergeFlags(str(adapter), str(tmp_path / "out")))
        assert not canary.ran.exists()

    @pytest.mark.parametrize(
        "read",
        [
            load_trained,
            lambda folder: merge_adapter(MergeFlags(str(folder), str(folder / "merged"))),
        ],
    )
    @pytest.mark.parametrize(
        ("settings", "found"),
        [
            (
                {"peft_type": "MULTITASK_PROMPT_TUNING", **FROM_A_FILE},
                "peft_type 'MULTITASK_PROMPT_TUNING'",
            ),
            ({"peft_type": "XLORA", "adapters": {"0": "other"}}, "peft_type 'XLORA'"),
            ({"megatron_config": {"a": 1}, "megatron_core": "megatron.canary"}, "megatron_config"),
        ],
    )
    def test_that_is_an_adapter_whose_configuration_reads_more_is_refused(
        self,
        finished_run: FinishedRun,
        tmp_path: Path,
        canary: Canary,
        read: Callable[[Path], object],
        settings: dict[str, Any],
        found: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "megatron").mkdir()
        (tmp_path / "megatron/canary.py").write_text(canary.python)
        canary.saved(tmp_path / "canary.pt")
        adapter = adapter_in(tmp_path / "adapter", finished_run.folder, canary, **settings)
        save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
        with refused("adapter-kind", found):
            read(adapter)
        assert not canary.ran.exists()

    def test_that_is_an_adapter_does_not_bring_another_with_its_base(
        self, finished_run: FinishedRun, tmp_path: Path, canary: Canary
    ) -> None:
        """transformers 5.23 reads that one, too: its kind, and the files that it names."""
        base = Path(shutil.copytree(finished_run.folder, tmp_path / "base"))
        adapter = adapter_in(tmp_path / "adapter", base, canary)
        save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(adapter / name, base)
        with refused("adapter-as-model"):
            load_trained(adapter)


def subprocess_of(*words: str) -> subprocess.CompletedProcess[str]:
    return start([*python(), "indictune/__main__.py", *words])


def adapter_in(folder: Path, base: Path, canary: Canary, **settings: object) -> Path:
    """An adapter whose weights are a canary, with further settings of its configuration."""
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": str(base), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    canary.saved(folder / "adapter_model.bin")
    return folder


@pytest.fixture(scope="module")
def stopped(finished_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that was stopped after step 4; its folder is to be copied."""
    job = Job(finished_run.recipe, tmp_path_factory.mktemp("stopped") / "out")
    result = job.start(f"SIGTERM@{STEP}:3")
    assert result.returncode == EXIT_RESUMABLE, result.stderr
    assert [path.name for path in store.checkpoints_in(job.folder)] == ["checkpoint-4", "checkpoint-2"]
    return job


def poison(checkpoint: Path, canary: Canary) -> None:
    """Put canaries in place of all pickles, and make a manifest that fits."""
    for name in PICKLES:
        canary.saved(checkpoint / name)
    manifest = store.read_manifest(checkpoint)
    assert manifest is not None
    digests = store.sync_files(checkpoint, store.files_in(checkpoint))
    (checkpoint / MANIFEST).write_text(replace(manifest, files=digests).to_json())


class TestACheckpoint:
    @pytest.fixture
    def job(self, stopped: Job, tmp_path: Path) -> Job:
        shutil.copytree(stopped.folder, tmp_path / "out")
        return replace(stopped, folder=tmp_path / "out")

    def refused(self, job: Job, *flags: str) -> str:
        result = replace(job, flags=flags).start()
        assert result.returncode == 2, result.stderr
        assert "Traceback" not in result.stderr
        return str(job.status["message"])

    @pytest.mark.more
    def test_of_ones_own_that_was_changed_is_passed_over(self, job: Job, canary: Canary) -> None:
        for name in PICKLES:
            canary.saved(job.folder / "checkpoint-4" / name)
        result = job.start()
        assert result.returncode == 0, result.stderr
        assert "Passed over checkpoint-4" in result.stderr
        assert not canary.ran.exists()

    def test_that_others_could_write_is_refused(self, job: Job, canary: Canary) -> None:
        poison(job.folder / "checkpoint-4", canary)
        (job.folder / "checkpoint-4" / "optimizer.pt").chmod(0o666)
        assert "optimizer.pt can be written by other users" in (message := self.refused(job))
        assert "pickles, which can run code" in message
        assert "--trust_checkpoint true" in message
        assert not canary.ran.exists()

    def test_in_a_folder_that_others_could_write_is_refused(self, job: Job, canary: Canary) -> None:
        poison(job.folder / "checkpoint-4", canary)
        job.folder.chmod(0o777)
        assert f"{job.folder} can be written by other users" in self.refused(job)
        assert not canary.ran.exists()

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
    def test_of_another_user_is_refused(self, job: Job, canary: Canary) -> None:
        poison(job.folder / "checkpoint-4", canary)
        os.chown(job.folder / "checkpoint-4" / "scheduler.pt", 12345, -1)
        assert "scheduler.pt belongs to another user" in self.refused(job)
        assert not canary.ran.exists()

    def test_from_elsewhere_is_refused(self, job: Job, canary: Canary, tmp_path: Path) -> None:
        elsewhere = job.folder.rename(tmp_path / "elsewhere") / "checkpoint-4"
        poison(elsewhere, canary)
        message = self.refused(job, "--resume_from_checkpoint", str(elsewhere))
        assert f"it is not in this run's --output_dir {job.folder}" in message
        assert not canary.ran.exists()

    @pytest.mark.more
    def test_from_elsewhere_is_gone_on_from_where_it_is_trusted(self, job: Job, tmp_path: Path) -> None:
        elsewhere = job.folder.rename(tmp_path / "elsewhere") / "checkpoint-4"
        flags = ("--resume_from_checkpoint", str(elsewhere), "--trust_checkpoint", "true")
        result = replace(job, flags=flags).start()
        assert result.returncode == 0, result.stderr

    def test_whose_best_one_others_could_write_is_refused(self, job: Job, canary: Canary) -> None:
        state = json.loads((job.folder / "checkpoint-4" / "trainer_state.json").read_text())
        best = job.folder / f"checkpoint-{state['best_global_step']}"
        assert best.is_dir()
        if best.name == "checkpoint-4":
            pytest.skip("the best one is the last")
        poison(best, canary)
        best.chmod(0o777)
        assert f"{best} can be written by other users" in self.refused(job)
        assert not canary.ran.exists()


@pytest.mark.more
def test_a_checkpoint_in_parts_runs_its_code_only_where_it_is_trusted(
    finished_run: FinishedRun, tmp_path: Path, canary: Canary
) -> None:
    """Of all files, those are unpickled without a list of what may be in them. Two ranks read them."""
    launcher, foreign = tuple(accelerate("fsdp2", 2)), tmp_path / "elsewhere" / "checkpoint-2"
    Job(finished_run.recipe, foreign.parent, launcher).start(f"SIGTERM@{STEP}:1")
    poison(foreign, canary)
    trusted = ("--trust_checkpoint", "true")

    job = Job(finished_run.recipe, tmp_path / "out", launcher, ("--resume_from_checkpoint", str(foreign)))
    assert job.start().returncode != 0
    assert "pickles, which can run code" in job.status["message"]
    assert not canary.ran.exists()
    replace(job, flags=(*job.flags, *trusted)).start()
    assert canary.ran.exists()
    canary.ran.unlink()

    (foreign / "pytorch_model_fsdp_0" / ".metadata").chmod(0o666)
    convert = ("checkpoint", str(foreign), "--convert_to", str(tmp_path / "model"))
    assert "pickles, which can run code" in subprocess_of(*convert).stderr
    assert not canary.ran.exists()
    subprocess_of(*convert, *trusted)
    assert canary.ran.exists()


class TestADataset:
    def problem(self, folder: Path) -> str:
        with pytest.raises(UserError) as caught:
            load_splits(DataArguments(dataset_name=str(folder)))
        return caught.value.message

    def test_with_a_script_is_refused(self, tmp_path: Path, canary: Canary) -> None:
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "data.py").write_text(canary.python)
        (folder / "train.jsonl").write_text('{"text": "ok", "label": "a"}\n{"text": "no", "label": "b"}\n')
        assert "Dataset scripts are no longer supported" in self.problem(folder)
        assert not canary.ran.exists()

    @pytest.mark.parametrize("name", ["train.pkl", "train.parquet", "train.arrow", "train.jsonl", "train.csv"])
    def test_that_is_a_pickle_is_refused(self, tmp_path: Path, canary: Canary, name: str) -> None:
        canary.pickled(tmp_path / "data" / name)
        assert self.problem(tmp_path / "data").count("--dataset_name")
        assert not canary.ran.exists()

    @pytest.mark.parametrize("name", ["train.pkl", "train.parquet", "train.jsonl", "train.csv", "train.json"])
    def test_in_a_file_that_is_a_pickle_is_refused(self, tmp_path: Path, canary: Canary, name: str) -> None:
        canary.pickled(tmp_path / name)
        with pytest.raises(UserError, match="--train_file"):
            load_splits(DataArguments(train_file=str(tmp_path / name)))
        assert not canary.ran.exists()

    @pytest.mark.more
    def test_with_modules_in_its_folder_does_not_run_them(
        self, tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not in the current folder, which is the first that python looks in for a module that it is to run."""
        monkeypatch.chdir(tmp_path)
        (tmp_path / "indictune").mkdir()
        for name in ("pyarrow.py", "signal.py", "indictune/__init__.py"):
            (tmp_path / name).write_text(canary.python)
        rows = [f"text {row},{row % 2}\n" for row in range(20_002)]  # two batches: processes are started to clean them
        (tmp_path / "train.csv").write_text("".join(["text,label\n", *rows]))
        assert len(load_splits(DataArguments(train_file="train.csv")).rows["train"]) == 20_002
        assert not canary.ran.exists()


@pytest.mark.parametrize(
    "body",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch RAN') }}",
        "{{ lipsum.__globals__['os'].popen('touch RAN').read() }}",
        "{% include 'other.jinja' %}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(
    tmp_path: Path, canary: Canary, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    from indictune.data.chat.chat_tokens import choose_template

    monkeypatch.chdir(tmp_path)
    tokenizer: Any = load_tokenizer(ModelArguments("builtin:tiny-indic-llama"))
    Path("other.jinja").write_text("secret")
    Path("t.jinja").write_text("{% generation %}" + body.replace("RAN", str(canary.ran)) + "{% endgeneration %}")
    with pytest.raises(UserError, match="--chat_template"):
        choose_template(tokenizer, "t.jinja", False, False)
    assert not canary.ran.exists()
