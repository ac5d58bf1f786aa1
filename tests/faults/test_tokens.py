"""A token reaches the Hub, and nothing else: no file, no console, no argument of a process, no upload. And what a push
sends: the model, and a card that takes all for data."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from indictune.checkpoint import store
from indictune.cli import main
from indictune.commands import evaluate_file
from indictune.config.arguments import DataArguments, Method, ModelArguments, SentimentTrainingArguments
from indictune.config.recipe import read_recipe
from indictune.credentials import _logged_in, holds_token, without_tokens
from indictune.data.labels import class_weights
from indictune.distributed.launch import read_launch
from indictune.errors import UserError
from indictune.hub.publish import published
from indictune.models import builtin
from indictune.models.adapters import check_published_base
from tests.conftest import FinishedRun
from tests.faults.hostile import IN_ROWS, OBEYED
from tests.faults.hub import BASE, Hub, hub
from tests.faults.runs import FAULTY
from tests.ranks.launching import ROOT, SCRIPT, accelerate, python, start
from tests.refusals import refused

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary1234"
URL = f"https://user:{TOKEN}@huggingface.co/datasets/me/tweets"

# What may stand in the folder of a run before it begins.
OF_THE_USER = ("settings.py", "vocab.env", "vocab.txt", "tokenizer_notes.json", "other.safetensors", "prompt.jinja")


def holding_the_token(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "words",
    [
        ["--hub_token", TOKEN],
        [f"--hub_token={TOKEN}"],
        ["--hub-token", "anything at all"],
        ["--hub_tokn", TOKEN],
        ["--dataset_name", URL],
        ["--train_file", f"https://huggingface.co/datasets/x/resolve/main/t.csv?token={TOKEN}"],
        ["--model_name_or_path", f"https://me:{'x' * 8}@huggingface.co/me/model"],
        ["--run_name", f"my {TOKEN} run"],
        ["--run_name", f"exp_{TOKEN}"],
        ["--run_name", f"exp{TOKEN}"],
        [f"--{TOKEN}"],
        [TOKEN],
        ["--max_length", TOKEN],
    ],
)
def test_a_token_in_a_flag_is_refused_without_repeating_it(words: list[str]) -> None:
    recipe = read_recipe(words, (ModelArguments, DataArguments, SentimentTrainingArguments))
    assert recipe.values == {}
    (problem,) = recipe.problems
    assert not any(part in str(problem) for part in (TOKEN, "anything", "x" * 8))


@pytest.mark.parametrize(
    "token",
    [
        *("hf_oauth_eyJhbGciOi.JIUzI1NiJ9-x_y", "hf_jwt_eyJhbGciOiJIUzI1.NiJ9-x_yzabc"),
        *(f"ghp_{'aB3' * 12}", f"github_pat_{'aB3_' * 20}", f"sk-{'aB3' * 16}", f"sk-proj-{'aB3-_' * 20}x"),
    ],
)
def test_other_tokens_of_the_hub_and_keys_are_tokens_too(token: str) -> None:
    assert holds_token(f"run-{token}")
    assert without_tokens(f"see {token}, again") == "see (a token), again"


def test_a_name_that_begins_as_a_token_is_none() -> None:
    given = {"train_file": "data/hf_sentimenttweets2024.csv", "output_dir": "outputs/hf_oauth_sentiment"}
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    recipe = read_recipe(words, (ModelArguments, DataArguments, SentimentTrainingArguments))
    assert (recipe.values, recipe.problems) == (given, [])


def test_a_command_that_is_refused_repeats_no_login(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"peft_type": "LORA", "task_type": "SEQ_CLS", "base_model_name_or_path": f"{URL}/x"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = {f"base_model.model.query.lora_{part}.weight": torch.ones(1, 1) for part in "AB"}
    save_file(weights, tmp_path / "adapter_model.safetensors")
    assert main(["merge", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "https://(a login)@huggingface.co/datasets/me/tweets" in said
    assert TOKEN not in said


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("job_name", [TOKEN, f"exp_{TOKEN}", TOKEN.replace("C", "\\u0043"), URL])
def test_a_token_in_a_deepspeed_file_is_refused_without_repeating_it(
    tmp_path: Path, job_name: str, is_text: bool
) -> None:
    """DeepSpeed's checkpoints and `training_args.bin` would hold it, whoever names the file."""
    text = f'{{"zero_optimization": {{"stage": 2}}, "csv_monitor": {{"job_name": "{job_name}"}}}}'
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_launch({"LOCAL_RANK": "0"}, text if is_text else str(path))
    (problem,) = caught.value.problems
    assert (problem.code, problem.flag) == ("token-in-the-open", "--deepspeed")
    assert TOKEN not in str(problem)
    path.write_text(text.replace(job_name, "mine"))
    assert read_launch({"LOCAL_RANK": "0"}, str(path)).strategy == "zero2"


@pytest.mark.parametrize(
    "text",
    [
        f'hub_token: "{TOKEN}"x\n',
        f'hub_token: "{TOKEN}\n',
        f"hub_token: [{TOKEN}\n",
        f"hub_token: {TOKEN}: x\n",
        f"hub_token: *{TOKEN}\n",
        f"hub_token: !{TOKEN} x\n",
        f"hub_token: !!int {TOKEN}\n",
        f"hub_token: !!bool {TOKEN}\n",
        f"hub_token: !!timestamp {TOKEN}\n",
        f"{TOKEN}\x07: x\n",
    ],
)
def test_a_token_in_a_file_that_is_no_yaml_is_not_repeated(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    recipe = read_recipe(["--config", str(path)], (ModelArguments, DataArguments, SentimentTrainingArguments))
    (problem,) = recipe.problems
    assert (problem.code, problem.flag) == ("not-yaml", "--config")
    with pytest.raises(UserError) as caught:
        evaluate_file._take_from_training(recipe, trained_with(path))
    shown = [problem, *caught.value.problems]
    if "!!" not in text:  # which means nothing in a file of label: weight
        with pytest.raises(UserError) as caught:
            class_weights(str(path), {"a": 1}, ["a"])
        shown += caught.value.problems
    assert not any(TOKEN[:8] in str(each) for each in shown), shown


def trained_with(recipe: Path) -> Path:
    """A folder that looks like a finished run of the recipe."""
    (recipe.parent / "config.json").write_text("{}")
    shutil.copy(recipe, recipe.parent / "recipe.yaml")
    return recipe.parent


def test_the_token_that_is_set_here_is_known_whatever_its_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "many-plain-words")
    types = (ModelArguments, DataArguments, SentimentTrainingArguments)
    assert read_recipe(["--output_dir", "out-many-plain-words"], types).values == {}
    assert without_tokens("of many-plain-words") == "of (a token)"
    monkeypatch.delenv("HF_TOKEN")
    given = {"output_dir": "out-many-plain-words"}
    assert read_recipe(["--output_dir", "out-many-plain-words"], types).values == given


def test_the_token_of_a_login_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never by a log line: that reads files, and may ask the network under a lock under which it logs."""
    tokens = iter(["many-plain-words"])
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: next(tokens))
    _logged_in.cache_clear()
    assert [without_tokens("many-plain-words") for _ in range(2)] == 2 * ["(a token)"]
    _logged_in.cache_clear()
    assert without_tokens("many-plain-words") == "many-plain-words"  # no error, though the token is no longer known
    _logged_in.cache_clear()


@pytest.mark.parametrize("placeholder", ["none", "test", "hf", "x", "not-a-token"])
def test_a_placeholder_for_a_token_is_none(placeholder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", placeholder)
    types = (ModelArguments, DataArguments, SentimentTrainingArguments)
    recipe = read_recipe(["--report_to", "none", "--output_dir", f"out/{placeholder}"], types)
    assert (recipe.values, recipe.problems) == ({"report_to": ["none"], "output_dir": f"out/{placeholder}"}, [])
    assert without_tokens(f"out/{placeholder}") == f"out/{placeholder}"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"401 for {URL}", "401 for https://(a login)@huggingface.co/datasets/me/tweets"),
        ("connect to 'http://me:a:b@127.0.0.1:80' to", "connect to 'http://(a login)@127.0.0.1:80' to"),
        (f"Bearer {TOKEN}.", "Bearer (a token)."),
        (
            "for url 'https://cdn/x?Expires=1&Signature=a~b__&Key-Pair-Id=K' (id 7)",
            "for url 'https://cdn/x?Expires=1&Signature=(hidden)&Key-Pair-Id=K' (id 7)",
        ),
        ("https://s3/x?X-Amz-Credential=A%2F1&X-Amz-Date=2", "https://s3/x?X-Amz-Credential=(hidden)&X-Amz-Date=2"),
        ("postgresql://db:1/x?user=me&password=secret", "postgresql://db:1/x?user=me&password=(hidden)"),
        ("hf://datasets/me/tweets@0f/t.csv, me@host", "hf://datasets/me/tweets@0f/t.csv, me@host"),
    ],
)
def test_what_is_said_of_a_url_has_neither_its_login_nor_its_signature(said: str, shown: str) -> None:
    assert without_tokens(said) == shown


def test_tokens_in_flags_and_recipe_end_the_run_and_are_written_nowhere(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe" / "r.yaml"
    recipe.parent.mkdir()
    recipe.write_text(f"{finished_run.recipe.read_text()}hub_token: {TOKEN}\n")
    out = tmp_path / "out"
    flags = ["--config", str(recipe), "--output_dir", str(out), "--hub_token", TOKEN, "--dataset_name", URL]
    result = start([*python(), SCRIPT, *flags])
    assert result.returncode == 2
    for shown in ("--hub_token: ", "r.yaml: hub_token: ", "--dataset_name: "):
        assert f"{shown}a token in a command or a file can be read by others" in result.stderr
    assert "set HF_TOKEN or type `hf auth login`" in result.stderr
    assert TOKEN not in result.stdout + result.stderr
    assert json.loads((out / "status.json").read_text())["state"] == "user_error"
    assert holding_the_token(out) == []


def hostile_rows(folder: Path, script: str = SCRIPT) -> list[str]:
    """Flags of a short run of a script whose labels and languages are hostile."""
    for split, number in (("train", 10), ("validation", 5)):
        rows: list[dict[str, str]] = [{"language": IN_ROWS[-index % 5]} for index in range(number)]
        for index, row in enumerate(rows):
            if script == SCRIPT:
                row |= {"text": f"{split} फिल्म {index}", "label": IN_ROWS[index % 5]}
            else:
                row |= {"prompt": f"{split} {index}?", "completion": f"फिल्म {index}"}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        *("--train_file", str(folder / "train.jsonl"), "--validation_file", str(folder / "validation.jsonl")),
        *("--output_dir", str(folder / "out"), "--num_train_epochs", "1", "--push_to_hub", "true"),
        *("--hub_model_id", "me/out", "--dataloader_num_workers", "1"),
    ]


@pytest.fixture
def hostile(tmp_path: Path) -> list[str]:
    """`hostile_rows` of a classifier."""
    return hostile_rows(tmp_path)


def pushed(
    recipe: Path, flags: list[str], endpoint: str, *before: str, script: str = SCRIPT, ranks: int = 1
) -> tuple[int, str, list[list[str]]]:
    """Exit code, what it said, and the arguments of all processes that it started; `before` the script comes a
    program that runs it. Several ranks are of DDP."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "OMP_NUM_THREADS": "1",
    }
    launcher = python() if ranks == 1 else accelerate("ddp", ranks)
    command = [*launcher, *before, script, "--config", str(recipe), *flags]
    seen: dict[int, list[str]] = {}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                seen |= {each.pid: each.cmdline() for each in (parent, *parent.children(recursive=True))}
            except psutil.NoSuchProcess:
                continue
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        assert process.stdout is not None
        said = process.stdout.read().decode()
    return process.returncode, said, list(seen.values())


@dataclass(frozen=True)
class Kind:
    """What is trained and pushed.

    Attributes:
        script: that trains.
        flags: of the run.
        base: the built-in model that it starts from, as a folder of this machine or as `hub.BASE`.
        files: that are pushed.
        ranks: that train it.
    """

    script: str
    flags: tuple[str, ...]
    base: str
    files: frozenset[str]
    ranks: int = 1


OF_ALL = frozenset(
    {"README.md", "metrics.json", "evaluation.json", "report.html", "tokenizer.json", "tokenizer_config.json"}
)
OF_AN_ADAPTER = OF_ALL | {"adapter_config.json", "adapter_model.safetensors", "base_model.json"}
LORA = ("--model_name_or_path", BASE, "--method", "lora")
KINDS = {
    "classifier": Kind(
        *(SCRIPT, ("--model_name_or_path", "{base}", "--max_tokens_per_device", "32"), "builtin:tiny-indic-bert"),
        OF_ALL | {"config.json", "model.safetensors"},
    ),
    "classifier on two ranks": Kind(
        *(SCRIPT, ("--model_name_or_path", "{base}"), "builtin:tiny-indic-bert"),
        *(OF_ALL | {"config.json", "model.safetensors"}, 2),
    ),
    "adapter of a classifier": Kind(SCRIPT, LORA, "builtin:tiny-indic-bert", OF_AN_ADAPTER | {"config.json"}),
    "adapter of a LLaMA": Kind(
        *("scripts/train_llama.py", (*LORA, "--max_length", "128"), "builtin:tiny-indic-llama"),
        OF_AN_ADAPTER | {"base_config.json", "chat_template.jinja", "generation_config.json"},
    ),
}


@dataclass(frozen=True)
class Pushed:
    """A run that was pushed.

    Attributes:
        kind: of it.
        kept: by the Hub.
        said: on the console.
        arguments: of all of its processes.
        out: its folder.
        cache: its `INDICTUNE_CACHE`.
    """

    kind: Kind
    kept: Hub
    said: str
    arguments: list[list[str]]
    out: Path
    cache: Path

    @property
    def card(self) -> str:
        return self.kept.files["README.md"].decode()


@pytest.fixture(
    scope="module",
    params=[
        *("classifier", pytest.param("classifier on two ranks", marks=pytest.mark.slow)),
        pytest.param("adapter of a classifier", marks=pytest.mark.slow),
        pytest.param("adapter of a LLaMA", marks=pytest.mark.slow),
    ],
)
def push(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    """Of hostile labels and languages, into a folder with files of its user's."""
    kind, work = KINDS[request.param], tmp_path_factory.mktemp("pushed")
    base = Path(shutil.copytree(builtin.resolve(kind.base), work / "base"))
    cache, out = work / "cache", work / "out"  # rows are prepared there
    flags = [*hostile_rows(work, kind.script), *(flag.format(base=base) for flag in kind.flags)]
    recipe = work / "job.yaml"
    recipe.write_text("global_batch_size: 8\nper_device_train_batch_size: 4\nlogging_steps: 1\n", encoding="utf-8")
    out.mkdir()
    for name in OF_THE_USER:
        (out / name).write_text("secret")
    before = sorted(work.iterdir())
    with pytest.MonkeyPatch.context() as patch, hub() as kept:
        patch.setenv("INDICTUNE_CACHE", str(cache))
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        kept.base = base
        code, said, arguments = pushed(recipe, flags, kept.url, script=kind.script, ranks=kind.ranks)
    assert code == 0, said
    assert sorted(work.iterdir()) == sorted([*before, cache])
    return Pushed(kind, kept, said, arguments, out, cache)


@pytest.mark.more
def test_a_push_sends_the_model_and_its_card_alone_and_the_token_is_nowhere_else(push: Pushed) -> None:
    kept = push.kept
    assert kept.tokens - {""} == {f"Bearer {TOKEN}"}  # huggingface_hub (2.4) may ask for a list of agents without it
    pictures = {name for name in kept.files if name.startswith("figures/")}
    assert pictures >= {"figures/loss.png", "figures/languages.png"}
    assert set(kept.files) - pictures == push.kind.files
    assert (push.out / "training_args.bin").exists()
    assert not any(TOKEN.encode() in body for body in kept.sent)
    assert not any(str(push.out.parent).encode() in content for content in kept.files.values())
    assert len(push.arguments) > 1
    assert not any(TOKEN in word for words in push.arguments for word in words)
    assert TOKEN not in push.said
    assert holding_the_token(push.out) == []
    assert (push.cache / "prepared").exists()
    assert holding_the_token(push.cache) == []
    assert not (push.out / ".not_pushed").exists()


@pytest.mark.more
def test_a_card_says_what_is_so_and_takes_labels_and_languages_for_data(push: Pushed) -> None:
    card, metrics = push.card, json.loads(push.kept.files["metrics.json"])
    assert list(metrics["eval"]["per_language"]) == sorted(IN_ROWS)
    assert "\x1b[2J" not in push.said  # a progress bar moves the cursor by itself
    report = push.kept.files["report.html"].decode()
    assert "<h1>out</h1>" in report
    assert "<script>" not in report
    assert "\x1b" not in report
    assert "<blockquote" not in report  # no texts of rows
    assert "<blockquote" in (push.out / "report.html").read_text(encoding="utf-8")
    if push.kind.script == SCRIPT:
        names = list(json.loads(push.kept.files["config.json"])["label2id"])
        assert names == sorted(" ".join(each.split()) for each in IN_ROWS)  # a line break looks like a space
        assert "escaped" in card
    for markup in OBEYED:
        assert markup not in card
    assert "None" not in card.replace("None was given", "")
    for shown in ("| global batch, in rows | 8 |", "Versions: indictune ", 'MODEL = "me/out"'):
        assert f"\n{shown}" in card
    if "adapter_config.json" in push.kind.files:
        for shown in ("library_name: peft", f"base_model: {BASE}", "license: mit"):
            assert f"\n{shown}\n" in card
        assert f"fine-tuned from [{BASE}](https://huggingface.co/{BASE}) with" in card
    else:
        assert "fine-tuned from a model that is not on the Hub with" in card
    if push.kind.script != SCRIPT:
        assert "- sft" in card.splitlines()


@pytest.mark.slow
def test_a_push_that_fails_says_how_to_go_on_and_keeps_the_token(
    finished_run: FinishedRun, hostile: list[str], tmp_path: Path
) -> None:
    out, auto = tmp_path / "out", ["--resume_from_checkpoint", "auto"]
    with hub() as kept:
        kept.refuses = True
        endpoint = kept.url.replace("//", f"//me:{TOKEN}@")
        code, said, _ = pushed(finished_run.recipe, hostile, endpoint)
        assert code == 1, said
        assert f"The model is whole in {out}; the push failed" in said
        assert f"{kept.url.replace('//', '//(a login)@')}/api/" in said
        assert TOKEN not in said
        assert holding_the_token(out) == []
        assert "trained from random weights" in (out / "README.md").read_text()
        # The run is not done when it is started again.
        code, said, _ = pushed(finished_run.recipe, [*hostile, *auto], endpoint)
        assert code == 1, said
        status = json.loads((out / "status.json").read_text())
        assert status["state"] == "failed"
        assert f"indictune push {out} me/out" in status["message"]
        assert said.count(status["message"]) == 1
        kept.refuses = False
        code, said, _ = pushed(finished_run.recipe, [*hostile, *auto], endpoint)
    assert code == 0, said
    assert "model.safetensors" in kept.files
    assert json.loads((out / "status.json").read_text())["state"] == "ok"


@pytest.mark.slow
def test_a_hub_that_is_away_ends_a_new_run_and_not_one_that_goes_on(
    finished_run: FinishedRun, hostile: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = (finished_run.recipe, [*hostile, "--resume_from_checkpoint", "auto"])
    with hub() as kept:
        kept.away_for = 99
        code, said, _ = pushed(*command, kept.url)
        assert code == 2, said
        assert "--push_to_hub: the repository me/out could not be made (HfHubHTTPError: " in said
        assert "Traceback" not in said
        assert store.checkpoints_in(out) == []
        kept.away_for = 0
        code, said, _ = pushed(*command, kept.url, FAULTY, "SIGKILL@indictune.training.finish:save_model:1")
        assert code == -9, said
        kept.away_for = 6
        code, said, _ = pushed(*command, kept.url)
    assert code == 0, said
    assert "its push at the end tries again" in said
    assert "model.safetensors" in kept.files
    assert TOKEN not in said


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_pushes_is_pushed_by_the_same_command(
    finished_run: FinishedRun, hostile: list[str], tmp_path: Path
) -> None:
    command = (finished_run.recipe, [*hostile, "--resume_from_checkpoint", "auto"])
    with hub() as kept:
        # When metrics.json, the mark of a finished run, has just been written.
        code, said, _ = pushed(*command, kept.url, FAULTY, "SIGKILL@indictune.hub.publish:publish_run:1")
        assert code == -9, said
        assert (tmp_path / "out" / "metrics.json").exists()
        code, said, _ = pushed(*command, kept.url)
    assert code == 0, said
    assert "model.safetensors" in kept.files
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "ok"


def test_an_adapter_on_a_folder_of_this_machine_is_not_pushed(finished_run: FinishedRun, tmp_path: Path) -> None:
    """Its files and its card would name the folder."""
    flags = ["--output_dir", str(tmp_path / "out"), "--method", "lora", "--push_to_hub", "true", "--seed", "x"]
    result = start([*python(), SCRIPT, "--config", str(finished_run.recipe), *flags], {"HF_TOKEN": TOKEN})
    assert result.returncode == 2
    assert "[push-of-local-base]" in result.stderr
    assert "--seed x" in result.stderr


@pytest.mark.parametrize(("method", "push"), [("full", True), ("lora", False)])
def test_other_models_on_a_folder_are(tmp_path: Path, method: Method, push: bool) -> None:
    check_published_base(ModelArguments(str(tmp_path), method=method), push)
    check_published_base(ModelArguments("me/model", method="lora"), push_to_hub=True)
    with refused("push-of-local-base", str(tmp_path), flag="--push_to_hub"):
        check_published_base(ModelArguments(str(tmp_path), method="lora"), push_to_hub=True)


def test_links_and_what_is_no_part_of_a_model_are_not_pushed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    out = tmp_path / "out"
    for name in ("model.safetensors", "training_args.bin", "recipe.yaml", "status.json", "logs/rank-0.log", ".env"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    for name in ("checkpoint-4/model.safetensors", "evaluation/metrics.json"):
        (out / name).parent.mkdir()
        (out / name).touch()
    for name in ("tokenizer.json", "README.md"):
        (out / name).symlink_to(tmp_path / "secret")
    assert published(out, [path.name for path in out.iterdir()]) == ["model.safetensors"]


def test_of_the_folder_only_what_the_run_has_saved_is_pushed(tmp_path: Path) -> None:
    for name in ("model.safetensors", "code.py", "README.md", "metrics.json", *OF_THE_USER):
        (tmp_path / name).touch()
    saved = ["model.safetensors", "code.py", "training_args.bin", "config.json"]
    assert published(tmp_path, saved) == ["README.md", "code.py", "metrics.json", "model.safetensors"]
