"""The model card: what it says, what it takes for data, and that its program runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from indictune.cli import main
from indictune.config.arguments import ModelArguments
from indictune.hub.card import card_of, write_card
from indictune.hub.card_facts import CardFacts, card_facts_of
from indictune.hub.public_text import escaped, fenced, without_folders
from indictune.models import builtin
from indictune.models.adapters import save_adapter_extras
from indictune.models.load import load_tokenizer
from indictune.models.task_models import load_causal, load_classifier
from tests.conftest import FinishedRun
from tests.faults.hostile import IN_ROWS, OBEYED
from tests.hub.folders import CONFIG, LABELS, METRICS, RECIPE, estimate, group, model_folder, write_evaluation

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary1234"
BASE = "ai4bharat/IndicBERTv2-MLM-only"


def card_in(folder: Path, repository: str | None = None) -> ModelCard:
    return card_of(card_facts_of(folder, repository, folder))


def run_program(card: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the first program of a card prints."""
    (program, *_) = re.findall(r"```python\n(.*?)\n```", card, flags=re.DOTALL)
    exec(program, {})
    return capsys.readouterr().out


def test_the_metadata_are_those_of_the_run(tmp_path: Path) -> None:
    card = card_in(model_folder(tmp_path / "out"), "me/tweets")
    data = yaml.safe_load(card.data.to_yaml())
    index = data.pop("model-index")
    assert data == {
        "language": ["hi", "te"],
        "base_model": BASE,
        "pipeline_tag": "text-classification",
        "library_name": "transformers",
        "tags": ["indictune"],
        "metrics": ["accuracy", "f1", "loss"],
    }
    assert index[0]["name"] == "tweets"
    by_language = {each["dataset"].get("config"): each for each in index[0]["results"]}
    assert set(by_language) == {None, "hi", "te"}
    assert by_language["te"]["metrics"] == [
        {"type": "accuracy", "value": 0.75, "name": "accuracy"},
        {"type": "f1", "value": 0.25, "name": "macro f1"},
    ]


def test_the_card_has_results_data_and_training(tmp_path: Path) -> None:
    text = card_in(model_folder(tmp_path / "out")).text
    for line in (
        *("| language te | 40 |  | 0.7500 | 0.2500 |", "| all | 100 | 0.2500 | 0.7500 | 0.5000 |"),
        *("| language hi | 700 |", "| label negative | 1,200 |"),
        *(
            "- 2 are alike.",
            "| processes (world size) | 8 |",
            "| global batch, in rows | 256 |",
            "Versions: torch 2.13.0.",
        ),
        *("| learning rate | 2e-05 |", "| devices | 8 x NVIDIA A100 |", 'MODEL = "out"'),
        "indictune train classification --strategy ddp --num_processes 8 \\",
    ):
        assert f"\n{line}\n" in text
    assert f"[{BASE}](https://huggingface.co/{BASE})" in text


def test_scores_have_their_intervals(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    write_evaluation(folder)
    text = card_in(folder).text
    for line in (
        *("| all | 50 | 0.5000 (0.4000 to 0.6000) |", "| language te | 50 | 0.4000 (0.3000 to 0.5000) |"),
        "| neutral | 25 | 0.8000 (0.7000 to 0.9000) | 0.4000 (0.3000 to 0.5000) | 0.6000 (0.5000 to 0.7000) |",
        "- te where errors are costly: its macro f1 is 0.4000, the lowest of all languages.",
        "Expected calibration error: 0.2000; 0.1250 if logits are divided by 2.00.",
        "In brackets: 95% bootstrap intervals.",
    ):
        assert f"\n{line}\n" in text


def test_the_worst_language_of_a_loss_has_the_highest(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    write_evaluation(folder)
    content = json.loads((folder / "evaluation.json").read_text())
    content["test"] |= {"lower_is_better": True, "worst_language": "hi"}
    (folder / "evaluation.json").write_text(json.dumps(content))
    assert "its macro f1 is 0.5000, the highest of all languages." in card_in(folder).text


def test_a_language_that_is_not_known_is_written_for_people(tmp_path: Path) -> None:
    groups = {"per_language": dict.fromkeys(("hi", "und-Latn", "und"), METRICS["test"])}
    data = {"rows": 5, "languages": {"hi": 3, "und-Latn": 1, "und": 1}}
    folder = model_folder(tmp_path / "out", METRICS | {"data": data, "test": METRICS["test"] | groups})
    of_block = card_in(folder).text
    write_evaluation(folder, ("hi", "und-Latn"))
    for text in (of_block, card_in(folder).text):
        assert "language Latin letters, not English" in text
        assert "und-Latn" not in text


def test_answers_that_the_model_wrote_have_their_scores(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    write_evaluation(folder)
    content = json.loads((folder / "evaluation.json").read_text())
    content["test"]["written"] = {**content["test"], "calibration": None}
    content["test"]["written"]["overall"] = group(0.5) | {"scores": {"chrf": estimate(34.5)}}
    content["test"]["written"]["by"] = {"language": {}}
    (folder / "evaluation.json").write_text(json.dumps(content))
    assert "\n| all | 50 | 34.5000 (34.4000 to 34.6000) |\n" in card_in(folder).text


def test_the_baseline_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    found = {"model": "n-grams", "split": "test", "seconds": 1.2, "overall": {"first": 0.64, "second": 0.639}}
    (folder / "baseline.json").write_text(json.dumps(found))
    line = "A baseline in 1.2 s, on the test rows: n-grams. Its macro f1 is 0.6400, the model's 0.6390."
    assert f"\n{line}\n" in card_in(folder).text


def test_energy_is_that_of_codecarbon(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    assert "energy" not in card_in(folder).text
    (folder / "emissions.csv").write_text("emissions,energy_consumed\n9,9\n0.002,0.01234\n")
    text = card_in(folder).text
    assert "| energy, in kWh (codecarbon) | 0.01234 |" in text
    assert "| emissions, in kg of CO2 (codecarbon) | 0.002 |" in text


def test_a_licence_is_the_users_or_asked_for(tmp_path: Path) -> None:
    given = card_in(model_folder(tmp_path / "given", recipe=f"{RECIPE}hub_license: apache-2.0\n"))
    assert given.data["license"] == "apache-2.0"
    assert "## Licence" not in given.text
    assert "## Licence" in card_in(model_folder(tmp_path / "out")).text  # no Hub answers here


def test_a_card_says_how_long_texts_are_read(tmp_path: Path) -> None:
    reading = {"text_reading": {"long_text": "window", "max_length": 12}}
    text = card_in(model_folder(tmp_path / "window", config=CONFIG | reading)).text
    assert all(part in text for part in ("12 tokens", "quarter", "indictune predict"))
    assert "special ones" not in card_in(model_folder(tmp_path / "out")).text


def test_folders_of_this_machine_and_tokens_stay_here(tmp_path: Path) -> None:
    notes = ["/home/me/secret/train.csv:3 is empty", "../data/x.csv and C:\\Users\\me\\y.csv"]
    chosen = RECIPE.replace("global_batch_size: 256", f"run_tag: https://me:{TOKEN}@host/x\nfew: [~/a/b.csv, {TOKEN}]")
    metrics = METRICS | {"data": METRICS["data"] | {"notes": [without_folders(note) for note in notes]}}
    card = str(card_in(model_folder(tmp_path / "out", metrics, chosen)))
    for kept in ("--train_file train.csv", "train.csv:3 is empty", "x.csv and y.csv", "--few b.csv '(a token)'"):
        assert kept in card
    for secret in ("/home", "secret", "Users", "~/a", TOKEN, str(tmp_path)):
        assert secret not in card


def test_texts_of_data_are_data(tmp_path: Path) -> None:
    test = METRICS["test"] | {"per_language": dict.fromkeys(IN_ROWS, METRICS["test"])}
    data = {"rows": 5, "languages": dict.fromkeys(IN_ROWS, 1), "notes": [*IN_ROWS, "```\n# d"]}
    config = CONFIG | {"id2label": {str(number): name for number, name in enumerate(IN_ROWS)}}
    recipe = RECIPE.replace("256\n", "256\nrun_tag: \"```\\n# e\"\nother: '{{ 7 * 7 }}'\n")
    folder = model_folder(tmp_path / "</h1><b>x", METRICS | {"data": data, "test": test}, recipe, config)
    write_evaluation(folder, IN_ROWS, (*IN_ROWS, "`a` **b** $c$"))
    card = card_in(folder)
    for markup in OBEYED:
        assert markup not in str(card)
    assert "{{ 7 * 7 }}" in str(card)
    tokens = MarkdownIt("commonmark").enable("table").parse(card.text)
    assert {each.type for each in tokens if "html" in each.type} == set()
    inline = [child for each in tokens for child in each.children or []]
    links = {str(child.attrGet("href")) for child in inline if child.type == "link_open"}
    assert links == {f"https://huggingface.co/{BASE}"}
    assert not {child.type for child in inline} & {"html_inline", "strong_open", "image"}
    headings = [tokens[at + 1].content for at, each in enumerate(tokens) if each.type == "heading_open"]
    assert [each for each in headings if each in ("b", "d", "e")] == []
    assert "".join(child.content for child in inline).count("| a |\\n# b") == 7  # each is shown as it is


@pytest.mark.parametrize("text", ["a_b", "<i>", "[x](y)", "a|b", "# h", "`c`", "&amp;", "\\", "~~s~~", "$x$", "é😍"])
def test_an_escaped_text_is_read_as_it_was(text: str) -> None:
    (inline,) = (each for each in MarkdownIt().parse(f"x {escaped(text)}") if each.type == "inline")
    assert "".join(child.content for child in inline.children or []) == f"x {text}"


def test_no_backticks_end_a_block_of_code() -> None:
    (block,) = MarkdownIt().parse(fenced("a\n````\n# b", "bash"))
    assert (block.type, block.content) == ("fence", "a\n````\n# b\n")


def test_a_finished_run_has_a_card_whose_program_runs(
    finished_run: FinishedRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run.folder
    monkeypatch.chdir(folder.parent)
    card = ModelCard.load(folder / "README.md")
    assert card.data["language"] == ["hi", "ta", "te"]
    assert "train.jsonl:31" in card.text  # a row without a text
    assert str(folder.parent) not in str(card)
    assert str(folder.parent) not in (folder / "metrics.json").read_text(encoding="utf-8")
    assert any(f"'label': '{label}'" in run_program(str(card), capsys) for label in LABELS)


def test_a_finished_run_has_a_report(finished_run: FinishedRun) -> None:
    folder = finished_run.folder
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert str(folder / "report.html") in finished_run.stdout
    assert str(folder.parent) not in page
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    wrong = [row for row in map(json.loads, lines) if row["split"] == "test" and row["label"] != row["predicted"]]
    assert wrong
    assert all(f"{row['row'].rpartition('/')[2]}</p>" in page for row in wrong[:1])
    assert {path.stem for path in (folder / "figures").iterdir()} >= {"loss", "languages", "confusion", "reliability"}


@pytest.mark.more
def test_the_program_of_an_adapter_of_a_classifier_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = builtin.resolve("builtin:tiny-indic-bert")
    args = ModelArguments(base, method="lora")
    model = load_classifier(args, LABELS, load_tokenizer(args))
    folder = saved(model, args, tmp_path / "out")
    for name in ("metrics.json", "recipe.yaml"):
        shutil.copy(model_folder(tmp_path / name) / name, folder)
    assert main(["merge", str(folder), "--output_dir", str(tmp_path / "merged")]) == 0
    merged = (tmp_path / "merged/README.md").read_text(encoding="utf-8")
    assert "library_name: transformers" in merged
    assert "| all | 100 | 0.2500 | 0.7500 | 0.5000 |" in merged
    capsys.readouterr()
    write_card(folder)
    monkeypatch.chdir(tmp_path)
    assert "[[" in run_program((folder / "README.md").read_text(encoding="utf-8"), capsys)  # logits
    assert "'score'" in run_program(merged, capsys)
    # As of a base on the Hub, which lies in a folder of that name here.
    monkeypatch.setattr(CardFacts, "base", "them/base")
    card = str(card_in(folder))
    Path("them").mkdir()
    Path("them/base").symlink_to(base)
    assert "library_name: peft" in card
    assert any(f"'label': '{label}'" in run_program(card, capsys) for label in LABELS)


def test_the_program_of_an_adapter_of_a_llama_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ModelArguments(builtin.resolve("builtin:tiny-indic-llama"), method="lora")
    folder = saved(load_causal(args, load_tokenizer(args), torch.float32, []), args, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CardFacts, "base", "them/base")
    card = card_in(folder)
    assert (card.data["pipeline_tag"], card.data["tags"]) == ("text-generation", ["indictune", "sft", "lora"])
    assert run_program(str(card), capsys)


def saved(model: Any, args: ModelArguments, folder: Path) -> Path:
    """An adapter's folder, as a run leaves it."""
    model.save_pretrained(str(folder))
    assert "More Information Needed" in (folder / "README.md").read_text(encoding="utf-8")
    save_adapter_extras(model, folder)
    assert not (folder / "README.md").exists()
    load_tokenizer(args).save_pretrained(folder)
    return folder


def test_a_task_of_the_users_own_has_a_card_without_a_program(tmp_path: Path) -> None:
    config = {"architectures": ["BertForMultipleChoice"], "model_type": "bert"}
    card = card_in(model_folder(tmp_path / "out", config=config))
    assert card.data["pipeline_tag"] is None
    assert "```python" not in card.text


def test_a_folder_with_a_configuration_alone_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "It was not evaluated." in card_in(tmp_path).text
