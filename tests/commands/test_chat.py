"""`indictune chat FOLDER`: a language model answers in the terminal, with the template of its training."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect  # type: ignore[import-untyped]
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from indictune.cli import main
from indictune.models.adapters import save_adapter_extras
from indictune.prediction.chat_model import TooLongError, open_chat_model
from tests.first_hour.saved_models import saved_llama
from tests.ranks.launching import ROOT

Talk = Callable[..., list[str]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("chat") / "llama")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """What the model says to lines from a pipe, by lines."""

    def run(folder: Path, text: str, *flags: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["chat", str(folder), "--max_new_tokens", "8", *flags]) == 0
        return capsys.readouterr().out.splitlines()

    return run


def continued(folder: Path, text: str) -> str:
    """The likeliest 8 tokens after a text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(ids, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


def opened(*turns: str) -> str:
    """Turns of user and assistant as LLaMA 3 writes them, and the begin of an answer."""
    roles = ("user", "assistant")
    written = [
        f"<|start_header_id|>{roles[i % 2]}<|end_header_id|>\n\n{turn.strip()}<|eot_id|>"
        for i, turn in enumerate(turns)
    ]
    return "".join(["<|begin_of_text|>", *written, "<|start_header_id|>assistant<|end_header_id|>\n\n"])


def test_lines_of_a_pipe_are_turns_of_one_conversation(llama: Path, talk: Talk) -> None:
    first = continued(llama, opened("नमस्ते"))
    second = continued(llama, opened("नमस्ते", first, "how are you?"))
    assert first != second
    assert talk(llama, "नमस्ते\n\n  \n how are you? \n/exit\nnever answered\n") == [first, second]


def test_an_adapter_and_its_merged_model_say_the_same(llama: Path, talk: Talk, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(llama), config)
    for folder in (tmp_path / "adapter", tmp_path / "merged"):
        AutoTokenizer.from_pretrained(llama).save_pretrained(folder)
    model.save_pretrained(str(tmp_path / "adapter"))
    save_adapter_extras(model, tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    said = talk(tmp_path / "adapter", "नमस्ते\n")
    assert said == talk(tmp_path / "merged", "नमस्ते\n") != talk(llama, "नमस्ते\n")


def test_texts_as_they_are_have_no_history(llama: Path, talk: Talk) -> None:
    first, second = talk(llama, "नमस्ते\nनमस्ते\n", "--chat_template", "plain")
    assert first == second == continued(llama, "<|begin_of_text|>नमस्ते")


@pytest.mark.more
def test_the_likeliest_tokens_or_drawn_ones(llama: Path, talk: Talk) -> None:
    assert len({tuple(talk(llama, "नमस्ते\n")) for _ in range(2)}) == 1
    assert len({tuple(talk(llama, "नमस्ते\n", "--temperature", "3")) for _ in range(2)}) == 2


def test_a_long_conversation_forgets_its_oldest_turns(llama: Path) -> None:
    talker = open_chat_model(str(llama), max_new_tokens=5)
    for turn in range(12):
        talker.answer(f"{turn} a b c d e f g h i j k l m n o p q r s t u v w x y z" * 2, print)
    assert talker.messages[-2]["content"].startswith("11 ")
    assert 2 <= len(talker.messages) < 24
    assert talker.messages[0]["role"] == "user"
    with pytest.raises(TooLongError, match=r" 512\."):
        talker.answer("a b " * 600, print)  # longer than the model's positions
    pieces: list[str] = []
    assert talker.answer("c", pieces.append) == "".join(pieces) != ""


@pytest.mark.parametrize(
    ("words", "code", "mentioned"),
    [
        (["classifier"], "no-language-model", "indictune predict classifier"),
        (["nothing"], "no-model", "nothing"),
        ([], "argument-missing", "indictune chat FOLDER"),
        (["classifier", "--temperature", "-1"], "expected-at-least", "--temperature -1"),
        (["classifier", "--max_new_tokens", "0"], "expected-at-least", "--max_new_tokens 0"),
    ],
)
def test_what_cannot_talk_is_refused(
    words: list[str],
    code: str,
    mentioned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("classifier").mkdir()
    config = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
    Path("classifier", "config.json").write_text(json.dumps(config))
    assert main(["chat", *words]) == 2
    message = capsys.readouterr().err
    assert mentioned in message
    assert message.endswith(f"[{code}]\n")


def test_a_model_without_a_template_names_the_flag(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert main(["chat", str(tmp_path / "model")]) == 2
    assert capsys.readouterr().err.endswith("[chat-template-missing]\n")


def test_ctrl_d_ends_a_terminal(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["", "नमस्ते"])

    def ask(prompt: str) -> str:
        print(prompt, end="")
        text = next(typed, None)
        if text is None:
            raise EOFError
        return text

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    assert main(["chat", str(llama), "--max_new_tokens", "8"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"> > {continued(llama, opened('नमस्ते'))}\n> \n"
    assert "/exit" in shown.err


@pytest.mark.more
def test_ctrl_c_ends_a_terminal_in_the_middle_of_an_answer(llama: Path) -> None:
    words = ["-m", "indictune", "chat", str(llama), "--temperature", "1"]
    terminal = pexpect.spawn(sys.executable, words, cwd=str(ROOT), encoding="utf-8", timeout=120)
    terminal.expect_exact("/exit or ctrl-D")
    terminal.expect_exact("\r\n> ")
    terminal.send("नमस्ते\r")
    terminal.expect_exact("\r\n")
    terminal.expect(r"\w")  # it answers now
    terminal.send("\x03")
    terminal.expect(pexpect.EOF)
    shown = terminal.before
    terminal.close()
    assert (terminal.exitstatus, terminal.signalstatus) == (0, None)
    assert "Traceback" not in shown
