"""LLaMA: the same recipe gives the same run under every strategy, and what is saved is what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from indictune.cli import main
from indictune.config.arguments import ModelArguments
from indictune.data.chat.chat_tokens import choose_template
from indictune.models import builtin
from indictune.models.load import load_tokenizer, load_trained
from tests.data.chats import load_test_file, tokenise_chats
from tests.ranks import reading
from tests.ranks.conftest import starter
from tests.ranks.launching import ROOT, Run, accelerate, python, start, train

SCRIPT = "scripts/train_llama.py"
CHATS = ROOT / "indictune/data/samples/chats"

# The learning rate of step 1 is 0, so that the checkpoint of step 1 holds the weights that the run started from.
JOB = """
model_name_or_path: builtin:tiny-indic-llama
dropout: 0
max_length: 128
global_batch_size: 12
per_device_train_batch_size: 3
per_device_eval_batch_size: 4
max_steps: 8
lr_scheduler_type: constant_with_warmup
warmup_steps: 1
logging_steps: 1
bf16: false
eval_strategy: 'no'
load_best_model_at_end: false
save_strategy: steps
save_steps: 1
save_total_limit: 20
"""

MICRO_BATCH_OF_12 = ("--per_device_train_batch_size", "12")
METHODS = {
    "full": ("--method", "full", "--learning_rate", "1e-4"),
    "lora": ("--method", "lora", "--learning_rate", "1e-3"),
    "qlora": ("--method", "qlora", "--learning_rate", "2e-4"),
}
# The whole global batch at once, so that nothing is split. In bf16 even the padding of a micro-batch changes the
# rounding: the 4-bit base is compared on the same micro-batches, summed by one process.
ONE_PROCESS = {"full": MICRO_BATCH_OF_12, "lora": MICRO_BATCH_OF_12, "qlora": ()}

slow = pytest.mark.slow

STOPPED_AT = 5  # in the second epoch, which begins after step 4
RESUMED = [("fsdp2", "full"), ("zero3", "full"), ("zero3", "lora"), ("fsdp2_qlora", "qlora")]

Start = Callable[..., Run]


def write_job(folder: Path) -> Path:
    """A recipe: 41 rows make 4 global batches of 12 an epoch, the last of them with 5 rows for 4 micro-batches."""
    lines = (CHATS / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    files = {"train_file": folder / "train.jsonl", "validation_file": folder / "validation.jsonl"}
    files["train_file"].write_text("".join(lines[:41]), encoding="utf-8")
    files["validation_file"].write_text("".join(lines[41:60]), encoding="utf-8")
    recipe = folder / "job.yaml"
    recipe.write_text(JOB + "".join(f"{key}: {json.dumps(str(path))}\n" for key, path in files.items()))
    return recipe


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`write_job` in a folder of its own."""
    return write_job(tmp_path_factory.mktemp("llama_job"))


@pytest.fixture(scope="module")
def run_under(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Train the job under a strategy with some flags; the same call gives the same run."""
    return starter(job, tmp_path_factory, SCRIPT)


def trained_weights(run: Run, method: str, folder: str = ".") -> dict[str, torch.Tensor]:
    """All weights, or the adapter's."""
    return load_file(run.folder / folder / ("model.safetensors" if method == "full" else "adapter_model.safetensors"))


@pytest.mark.more
def test_a_run_that_pads_its_rows_says_why(run_under: Start) -> None:
    run = run_under("single", 1, "--attn_implementation", "eager", "--max_steps", "1")
    assert run.metrics["train"]["padding_fraction"] > 0
    log = (run.folder / "logs/rank-0.log").read_text(encoding="utf-8")
    assert log.count("Padding rows, grouped by length: --attn_implementation eager may not keep") == 1


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """`tied_llama` in a folder of its own."""
    return tied_llama(tmp_path_factory.mktemp("tied"))


def tied_llama(folder: Path) -> tuple[str, str]:
    """A flag that names the built-in LLaMA with one weight for embedding and output layer, as LLaMA 3.2 has it."""
    source = builtin.resolve("builtin:tiny-indic-llama")
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    return "--model_name_or_path", str(folder)


@pytest.mark.parametrize(
    ("strategy", "method"),
    [pytest.param(*each, marks=slow) for each in (("fsdp2", "full"), ("fsdp2", "lora"), ("pipeline", "full"))],
)
def test_tied_weights_stay_tied(run_under: Start, tied: tuple[str, str], strategy: str, method: str) -> None:
    flags = (*tied, *METHODS[method], "--max_steps", "3")
    one, two = run_under("single", 1, *flags), run_under(strategy, 2, *flags)
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)


@slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_in_parts_becomes_the_model_of_the_run(
    run_under: Start, tied: tuple[str, str], tmp_path: Path, is_tied: bool
) -> None:
    flags = (*tied, *METHODS["full"], "--max_steps", "3") if is_tied else METHODS["full"]
    run = run_under("fsdp2", 2, *flags)
    checkpoint, folder = run.folder / f"checkpoint-{len(run.log)}", tmp_path / "model"
    assert not list(checkpoint.glob("*.safetensors"))
    assert main(["checkpoint", str(checkpoint), "--convert_to", str(folder)]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text()) == json.loads((run.folder / name).read_text())
    for saved in (folder, run.folder):
        assert ("lm_head.weight" in load_file(saved / "model.safetensors")) != is_tied
    model, expected = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, run.folder))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == is_tied
    found, weights = model.state_dict(), expected.state_dict()
    assert found.keys() == weights.keys()
    assert [name for name in found if not torch.equal(found[name], weights[name])] == []


@slow
@pytest.mark.parametrize(
    ("strategy", "whole"),
    [("zero3", "embed_tokens lm_head"), ("fsdp2", "embed_tokens")],
)
def test_named_targets_and_modules_trained_whole(run_under: Start, strategy: str, whole: str) -> None:
    flags = (*METHODS["lora"], "--lora_target_modules", "q_proj", "v_proj", "--modules_to_save", *whole.split())
    flags = (*flags, "--use_dora", "true", "--max_steps", "3")
    one, two = run_under("single", 1, *flags), run_under(strategy, 2, *flags)
    assert two.series("loss") == pytest.approx(one.series("loss"), rel=1e-4)
    assert two.series("grad_norm") == pytest.approx(one.series("grad_norm"), rel=1e-4)


def loss_read_anew(folder: Path, rows: Path) -> float:
    """Of the saved model on a file's answers, read by this process and computed from its logits in another way."""
    tokenizer = load_tokenizer(ModelArguments(str(folder)))
    conversations = load_test_file(str(rows))
    template = choose_template(tokenizer, None, as_written=False, train_on_prompts=False)
    tokens = tokenise_chats(conversations, tokenizer, template, max_length=128)
    model = load_trained(folder, kind=AutoModelForCausalLM, dtype=torch.float32).eval()
    total = count = 0.0
    for row in tokens:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"]])).logits.float()
        labels = torch.tensor(row["labels"][1:])
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], labels, reduction="sum"))
        count += int((labels != -100).sum())
    return total / count


@pytest.mark.more
def test_the_evaluate_command_gives_the_numbers_of_the_run(run_under: Start, job: Path, tmp_path: Path) -> None:
    run = run_under("single", 1, *METHODS["lora"])
    files = ["--test_file", str(job.parent / "validation.jsonl"), "--output_dir", str(tmp_path)]
    result = start([*python(), "indictune/__main__.py", "evaluate", "--model", str(run.folder), *files])
    assert result.returncode == 0, result.stderr
    scores = Run(tmp_path).metrics["test"]
    assert scores["loss"] == pytest.approx(run.metrics["eval"]["loss"], rel=1e-6)
    assert scores["num_tokens"] == run.metrics["eval"]["num_tokens"]


@pytest.mark.parametrize(
    ("strategy", "method"), [pytest.param(*case, marks=slow) for case in (("fsdp2", "lora"), *RESUMED)]
)
def test_auto_goes_on_from_the_newest_checkpoint(
    run_under: Start, job: Path, tmp_path: Path, strategy: str, method: str
) -> None:
    whole = run_under(strategy, 2, *METHODS[method])
    stopped = tmp_path / "run"
    shutil.copytree(whole.folder, stopped)
    for step in range(STOPPED_AT + 1, 9):
        shutil.rmtree(stopped / f"checkpoint-{step}")
    (stopped / "metrics.json").unlink()
    flags = ("--config", str(job), *METHODS[method], "--resume_from_checkpoint", "auto")
    resumed = train(accelerate(strategy, 2), stopped, *flags, script=SCRIPT)
    assert [entry["step"] for entry in resumed.log] == list(range(1, 9))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert resumed.series(name) == pytest.approx(whole.series(name), rel=1e-6)
    assert resumed.metrics["eval"]["loss"] == pytest.approx(whole.metrics["eval"]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "tp", "pipeline"])
def test_one_rank_reads_the_checkpoint(job: Path, tmp_path: Path, strategy: str) -> None:
    readers = tmp_path / "readers"
    readers.mkdir()
    flags = ("--config", str(job), *METHODS["full"], "--max_steps", "1")
    train(accelerate(strategy, 2), tmp_path / "out", *flags, script=reading.__file__, READERS=str(readers))
    assert [path.name for path in readers.iterdir()] == ["0"]
