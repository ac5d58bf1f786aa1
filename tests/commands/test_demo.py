"""`indictune demo`: a page for a classifier or a language model, and the same page as a Space."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from safetensors.torch import load_file, save_file

from indictune.cli import main
from indictune.commands.demo import DemoFlags, classify_with, demo_app
from indictune.config.shared_arguments import ClassifierArguments
from indictune.prediction.chat_model import open_chat_model
from indictune.prediction.labelled_rows import label_texts
from indictune.prediction.served_classifier import load_served_classifier
from tests.commands.random_models import of_pairs, random_classifier
from tests.first_hour.saved_models import saved_classifier, saved_llama
from tests.hub.folders import model_folder, write_weights
from tests.ranks.launching import ROOT, free_port

CHROMIUM = "/usr/bin/chromium"
QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
JSON = {"Content-Type": "application/json"}
FILES = {"files": ("a.html", b"<script>")}
TEXT = "बहुत अच्छी फिल्म थी 😍"
SHOWN = "text => [...document.querySelectorAll('textarea, input')].some(each => each.value === text)"

needs_gradio = pytest.mark.skipif(find_spec("gradio") is None, reason="Gradio is not installed: indictune[demo]")
needs_browser = pytest.mark.skipif(
    not Path(CHROMIUM).exists() or find_spec("playwright") is None, reason="no Chromium, or no playwright"
)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("demo") / "tweets")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("demo") / "llama")


def said(llama: Path, text: str, longest: int) -> str:
    return open_chat_model(str(llama), max_new_tokens=longest).answer(text, lambda _: None)


@contextmanager
def running(command: list[str], port: int, folder: Path = ROOT) -> Iterator[str]:
    """The address of a page, while its program runs. It may ask no other server: a proxy waits for that."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        address = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        away = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "NO_PROXY": "localhost,127.0.0.1,0.0.0.0"}
        environment = {**os.environ, **away, "HF_HUB_OFFLINE": "1", "GRADIO_SERVER_PORT": str(port)}
        with started([sys.executable, *command], folder, environment, port) as url:
            yield url
        assert select.select([proxy], [], [], 0)[0] == []


@contextmanager
def started(command: list[str], folder: Path, environment: dict[str, str], port: int) -> Iterator[str]:
    with subprocess.Popen(command, cwd=folder, env=environment) as program:
        try:
            for _ in range(600):
                try:
                    httpx2.get(f"http://127.0.0.1:{port}/config")
                    break
                except httpx2.HTTPError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            program.terminate()


@contextmanager
def browsing(url: str) -> Iterator[Any]:
    """The page in a browser. In the end, no script has failed and no other server was asked."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, driver.chromium.launch(executable_path=CHROMIUM, args=QUIET) as browser:
        page = browser.new_page()
        outside: list[str] = []
        failed: list[str] = []
        page.on("request", lambda request: outside.append(request.url) if url not in request.url else None)
        page.on("pageerror", lambda error: failed.append(str(error)))
        page.goto(url)
        yield page
        assert ([each for each in outside if each.startswith("http")], failed) == ([], [])


def demo(model: Path, port: int, *flags: str) -> list[str]:
    return ["-m", "indictune", "demo", str(model), "--port", str(port), *flags]


def check_classifier(url: str, expected: dict[str, Any]) -> None:
    """The page labels a text as it should."""
    with browsing(url) as page:
        page.get_by_label("Text", exact=True).fill(TEXT)
        page.get_by_role("button", name="Label it").click()
        page.wait_for_function(SHOWN, arg="Hindi")
        page.wait_for_function(SHOWN, arg=expected["label"])
        percent = f"{expected['scores'][expected['label']]:.0%}"
        page.get_by_text(percent).wait_for()


def check_chat(url: str, answer: str) -> None:
    """The page answers a message as it should."""
    with browsing(url) as page:
        page.locator("textarea").first.fill("नमस्ते")
        page.keyboard.press("Enter")
        page.get_by_text(" ".join(answer.split())).wait_for()


@needs_gradio
@needs_browser
@pytest.mark.slow
def test_a_browser_shows_the_scores_and_the_language_of_a_text(classifier: Path) -> None:
    (expected,) = label_texts(classifier, [TEXT])
    with running(demo(classifier, port := free_port()), port) as url:
        check_classifier(url, expected)


@needs_gradio
@needs_browser
@pytest.mark.slow
def test_a_browser_talks_to_a_language_model(llama: Path) -> None:
    with running(demo(llama, port := free_port(), "--max_new_tokens", "12"), port) as url:
        check_chat(url, said(llama, "नमस्ते", 12))


@needs_gradio
@needs_browser
@pytest.mark.slow
def test_an_exported_classifier_runs_in_another_folder(classifier: Path, tmp_path: Path) -> None:
    (expected,) = label_texts(classifier, [TEXT])
    assert main(["demo", str(classifier), "--export", str(tmp_path / "space")]) == 0
    moved = Path(shutil.move(tmp_path / "space", tmp_path / "moved"))
    with running(["app.py"], free_port(), moved) as url:
        assert httpx2.post(f"{url}/gradio_api/upload", files=FILES).status_code == 413
        assert httpx2.post(f"{url}/gradio_api/call/predict", json={"data": ["a" * 2_000_000]}).status_code == 413
        assert httpx2.get(f"{url}/gradio_api/runs").status_code == 404
        check_classifier(url, expected)


@needs_gradio
@needs_browser
@pytest.mark.slow
def test_an_exported_language_model_says_the_same(llama: Path, tmp_path: Path) -> None:
    assert main(["demo", str(llama), "--export", str(tmp_path / "space")]) == 0
    app = tmp_path / "space/app.py"
    app.write_text(app.read_text("utf-8").replace("MAX_NEW_TOKENS = 256", "MAX_NEW_TOKENS = 12"), "utf-8")
    with running(["app.py"], free_port(), tmp_path / "space") as url:
        check_chat(url, said(llama, "नमस्ते", 12))


@needs_gradio
def test_a_space_has_no_texts_of_rows(tmp_path: Path) -> None:
    """The report in the model's folder keeps them."""
    model, secret = model_folder(tmp_path / "out"), "words of a person"
    row = {"label": "neutral", "predicted": "positive", "wrongness": 0.75, "language": "hi", "text": secret}
    (model / "mistakes.json").write_text(json.dumps({"test": [row]}))
    (model / "report.html").write_text(secret)
    write_weights(model)
    assert main(["demo", str(model), "--export", str(tmp_path / "space")]) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "space").rglob("*") if path.is_file()}
    assert b"<h1>out</h1>" in files["report.html"]
    assert not any(secret.encode() in content for content in files.values())
    assert (model / "report.html").read_text() == secret


@pytest.mark.more
@needs_gradio
def test_a_page_takes_no_files(classifier: Path) -> None:
    async def answer() -> httpx2.Response:
        transport = httpx2.ASGITransport(demo_app(DemoFlags(str(classifier))))
        async with httpx2.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/gradio_api/upload", files=FILES)

    assert asyncio.run(answer()).status_code == 413


@needs_gradio
def test_the_limits_of_a_page_hold_in_its_server_too() -> None:
    """The pages of a Space start by these settings too."""
    from indictune.serving.gradio_pages import SERVER, Answer, classifier_page

    read: list[str] = []
    page = classifier_page("x", lambda text: read.append(text) or Answer("joy", None, "en"))  # type: ignore[func-returns-value]
    _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, server_port=free_port(), **SERVER)
    try:
        with httpx2.Client(base_url=f"{url}gradio_api", trust_env=False, timeout=20) as client:
            assert answer_of(client, "a" * 10_000)[0] == "complete"
            assert answer_of(client, "a" * 10_001)[0] == "error"
            large = json.dumps({"data": ["a" * 20_000_000]}).encode()
            began = time.monotonic()
            for content in (large, iter([large])):  # with its length, and without
                assert client.post("/call/predict", content=content, headers=JSON).status_code == 413
            assert time.monotonic() - began < 5
            assert client.post("/upload", files=FILES).status_code == 413
            assert client.get("/runs").status_code == 404
    finally:
        page.close(verbose=False)
    assert [len(text) for text in read] == [10_000]


@needs_gradio
@pytest.mark.more
def test_a_page_and_a_space_have_two_fields_for_pairs(tmp_path: Path) -> None:
    from indictune.serving.gradio_pages import classifier_page
    from indictune.serving.space_classifier import classifying, reads_pairs

    model = of_pairs(random_classifier(tmp_path / "xnli", "bert", layers=1))
    here, there = classify_with(load_served_classifier(ClassifierArguments(str(model)))), classifying(model)
    assert reads_pairs(model)
    for pair in ((TEXT, "फिल्म खराब थी"), ("worst movie @ever", "good movie " * 40)):
        (expected,) = label_texts(model, [pair])
        for classify in (here, there):
            answer = classify(*pair)
            assert (answer.label, answer.language) == (expected["label"], expected["language"])
            assert answer.scores == pytest.approx(expected["scores"], abs=1e-4)
            assert classify(pair[0], " ").label == ""
    page = classifier_page("x", there, pairs=True)
    (event,) = [each for each in page.get_config_file()["dependencies"] if each["api_name"] == "predict"]
    assert len(event["inputs"]) == 2
    assert main(["demo", str(model), "--export", str(tmp_path / "space")]) == 0
    assert reads_pairs(tmp_path / "space/model")


@needs_gradio
def test_a_space_whose_weights_are_broken_labels_nothing(classifier: Path, tmp_path: Path) -> None:
    from indictune.serving.space_classifier import classifying

    folder = Path(shutil.copytree(classifier, tmp_path / "broken"))
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no numbers"):
        classifying(folder)(TEXT)


def answer_of(client: httpx2.Client, text: str) -> tuple[str, str]:
    """What a page's API says to a text: the kind of the event, and its data."""
    event = client.post("/call/predict", json={"data": [text]}).json()["event_id"]
    kind, data = client.get(f"/call/predict/{event}").text.strip().splitlines()[-2:]
    return kind.removeprefix("event: "), data.removeprefix("data: ")


@needs_gradio
@pytest.mark.parametrize("history", [["a"] * 101, ["a" * 10_000] * 11])
def test_a_long_conversation_is_not_answered(history: list[str]) -> None:
    from gradio import Error

    from indictune.serving.gradio_pages import chat_page

    page = chat_page("x", lambda messages: iter([messages[-1]["content"]]))
    answered: Any = page.fn
    turns = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in history]
    assert [*answered("b" * 10_000, turns[:10])] == ["b" * 10_000]
    for words in (("b", turns), ("b" * 10_001, [])):
        with pytest.raises(Error):
            list(answered(*words))


@needs_gradio
def test_a_space_has_its_header_its_packages_and_no_path_of_this_machine(classifier: Path, tmp_path: Path) -> None:
    space = tmp_path / "space"
    assert main(["demo", str(classifier), "--export", str(space)]) == 0
    names = {path.name for path in space.iterdir()}
    assert names == {"app.py", "page.py", "languages.py", "requirements.txt", "README.md", ".gitattributes", "model"}
    header = yaml.safe_load((space / "README.md").read_text("utf-8").split("---\n")[1])
    assert (header["sdk"], header["app_file"], header["title"]) == ("gradio", "app.py", "tweets")
    assert re.fullmatch(r"\d+\.\d+\.\d+", header["sdk_version"])
    assert "transformers==" in (space / "requirements.txt").read_text("utf-8")
    for path in space.rglob("*"):
        if path.suffix in (".py", ".md", ".txt", ".json") and path.parent == space:
            text = path.read_text("utf-8")
            assert str(tmp_path) not in text
            assert str(classifier.parent) not in text
            assert not re.search(r"^\s*(?:from|import) indictune", text, flags=re.MULTILINE)
    assert json.loads((space / "model/config.json").read_text("utf-8"))["architectures"]
    assert not (space / "model/recipe.yaml").exists()


def test_what_cannot_be_shown_is_refused(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def code(*words: str) -> str:
        assert main(["demo", *words]) == 2
        return str(re.findall(r"\[([\w-]+)\]\n", capsys.readouterr().err)[-1])

    assert code() == "argument-missing"
    if find_spec("gradio") is not None:
        assert code(str(classifier), "--export", str(classifier)) == "folder-not-empty"
        assert code(str(tmp_path), "--export", str(tmp_path / "new")) == "no-model"
        assert code(str(tmp_path), "--port", "0") == "no-model"
        assert code(str(classifier), "--max_new_tokens", "5") == "no-effect"
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "adapter_config.json").write_text("{}")
        assert code(str(tmp_path), "--export", str(tmp_path / "new")) == "export-of-adapter"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "config.json"]
    monkeypatch.setitem(sys.modules, "gradio", None)
    for name in ("indictune.commands.demo", "indictune.serving.gradio_pages"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # imported anew, without Gradio
    assert code(str(classifier)) == "extra-missing"
