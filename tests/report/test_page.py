"""The report: what it shows of a run, what it takes for data, and that it never fails a run."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from indictune.cli import main
from indictune.config.recipe import Recipe
from indictune.errors import Problems
from indictune.report.report_page import against_baseline, write_report
from indictune.report.reported_run import compared_settings, matrices, read_run
from indictune.run import Run
from indictune.training.finish import report_run
from tests.faults.hostile import IN_ROWS
from tests.hub.folders import RECIPE, model_folder
from tests.report.folders import TEXTS, baseline, of_kind, run_folder, write

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary1234"
VOID = {"meta", "link", "br"}


class Read(HTMLParser):
    """A page as a browser reads it: elements with attributes, all text, and the text of each kind of element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.of: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        assert self._open == [], "elements stay open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len({name for name, _ in attrs}) == len(attrs)
        if tag not in VOID:
            self._open.append(tag)
            self.of.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        for tag in set(self._open):
            self.of[tag][-1] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(folder: Path, texts: bool = True) -> Read:
    return Read(write_report([folder], texts=texts).read_text(encoding="utf-8"))


def test_a_report_shows_all_that_a_run_left(tmp_path: Path) -> None:
    page = read(run_folder(tmp_path / "out"))
    for part in (
        *("2.25", "12.50%", "an example", "1 of 2 test rows nearly repeat one."),  # health
        *("88% sure", "test.csv:2", *TEXTS.values()),  # mistakes
        *("learning rate", "rows a second", "n-grams", "900 of 1,200"),
        *("8 x NVIDIA A100", "2.13.0", "learning_rate", "2e-05", "ai4bharat/IndicBERTv2-MLM-only"),
        "indictune train classification --strategy ddp --num_processes 8",
    ):
        assert part in page.text, part
    captions = ["Scores by language", "Scores by length, in tokens", "Scores by label", "Training rows"]
    assert page.of["caption"][:4] == captions
    assert [each["lang"] for each in page.named("blockquote")] == ["hi", "te", "ta"]
    assert {each["dir"] for each in page.named("blockquote")} == {"auto"}
    pictures = sorted(path.name for path in (tmp_path / "out/figures").iterdir())
    names = ("confusion", "languages", "learning_rate", "loss", "reliability", "samples_per_second")
    assert pictures == [f"{name}.png" for name in names]
    assert all((tmp_path / "out/figures" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    shown = [str(each["aria-label"]) for each in page.named("svg") if each.get("role") == "img"]
    assert len(shown) == 5
    # The log ends with a NaN and half a line.
    assert any(each.startswith("Training loss: 1 at step 1, 0.025 at step 40; lowest 0.025") for each in shown)
    assert any("ta: 0." in each for each in shown)


def test_a_confusion_matrix_has_the_counts_and_shares_of_its_language(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "out")
    content = json.loads((folder / "evaluation.json").read_text())["test"]
    content["by"]["language"]["te"]["confusion"] = [[4, 0, 0], [0, 1, 3], [0, 0, 0]]
    write(folder, "evaluation.json", {"test": content})
    breakdown = read_run(folder).breakdown
    assert breakdown is not None
    found = {each.caption: each for each in matrices(breakdown)}
    assert list(found) == ["all languages", "hi", "ta", "te"]
    rows = [("negative", [(4, 1.0), (0, 0.0), (0, 0.0)]), ("neutral", [(0, 0.0), (1, 0.25), (3, 0.75)])]
    assert found["te"].rows == [*rows, ("positive", [(0, 0.0)] * 3)]


@pytest.mark.parametrize(
    ("first", "interval", "says", "kind"),
    [
        (0.71, (-0.05, 0.03), "A tie with the baseline", "warning"),
        (0.2, (0.4, 0.6), "Better than the baseline", "good"),
        (0.95, (-0.4, -0.1), "Worse than the baseline", "warning"),
        (0.66, (0.01, 0.08), "Hardly better than the baseline", "warning"),  # in the interval of the model's own score
    ],
)
def test_a_tie_with_the_baseline_is_said_in_words(
    tmp_path: Path, first: float, interval: tuple[float, float], says: str, kind: str
) -> None:
    folder = run_folder(tmp_path / "out")
    write(folder, "baseline.json", baseline(first, 0.7, interval))
    verdict = against_baseline(read_run(folder))
    assert verdict is not None
    assert (verdict.title, verdict.kind) == (says, kind)
    assert f"model 0.700, baseline {first:.3f}" in verdict.reason


@pytest.mark.more
def test_texts_of_data_are_data_and_what_is_of_this_machine_stays_here(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    hostile = '"><img src=x onerror=alert(1)></blockquote><script>alert(2)</script>{{ 7 * 7 }}'
    recipe = RECIPE.replace("256\n", f"256\nrun_tag: https://me:{TOKEN}@host/x\nfew: [~/a/b.csv, {TOKEN}]\n")
    names = (*IN_ROWS, "हिन्दी")
    folder = run_folder(tmp_path / "</h1><b>x", names, (*IN_ROWS, "अच्छा"), hostile, recipe)
    (folder / "train_log.jsonl").unlink()
    finding = {"name": hostile, "note": hostile, "examples": [hostile]}
    write(folder, "health.json", {"findings": [finding], "languages": [{hostile: hostile}]})
    page = read(folder)
    assert hostile in page.of["blockquote"]
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object"} == set()
    assert all(attributes == {} for tag, attributes in page.elements if tag == "b")
    assert [name for _, attributes in page.elements for name in attributes if name.startswith("on")] == []
    links = [
        str(value) for _, each in page.elements for name, value in each.items() if "href" in name or name == "src"
    ]
    assert [each for each in links if not each.startswith(("#", "data:"))] == []
    assert page.named("meta")[1]["content"] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "train.csv" in text
    assert "b.csv, (a token)" in text
    for secret in ("/home", "secret", "~/a", TOKEN, str(tmp_path), "\x1b"):
        assert secret not in text
    # matplotlib has no letters for it.
    assert "हिन्दी" in page.of["th"]
    assert "हिन्दी" not in "".join(page.of["svg"])
    assert [each for each in recwarn if "Glyph" in str(each.message)] == []


def test_a_report_to_share_has_no_texts_of_rows(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "out")
    for name in ("evaluation.json", "train_log.jsonl"):
        (folder / name).unlink()
    assert all(text in read(folder).text for text in (*TEXTS.values(), "an example"))
    page = read(folder, texts=False)
    assert not any(text in page.text for text in (*TEXTS.values(), "an example"))
    assert "nearly repeat" in page.text


@pytest.mark.parametrize(
    ("kind", "score", "mistake"),
    [
        ("regression", "pearson", "right: 1.5 · predicted: -2.25 · 0.5 off"),
        ("multi_label", "micro F1", "right: none · predicted: a, b · 50% sure"),
        ("entities", "F1", "right: Asha B-PER · predicted: Asha O · 0 tags"),
        ("answers", "loss", "hi · 0.50 nats a token"),
    ],
)
def test_every_task_has_a_report(tmp_path: Path, kind: str, score: str, mistake: str) -> None:
    page = read(of_kind(tmp_path / "out", kind))
    assert score in page.of["th"]
    assert mistake in " ".join(page.text.split())
    assert (tmp_path / "out/figures/languages.png").is_file()
    assert "confusion" not in {each.get("id") for each in page.named("h2")}


def test_answers_that_a_language_model_wrote_are_shown_and_scored(tmp_path: Path) -> None:
    folder = of_kind(tmp_path / "out", "answers")
    page = read(folder)
    assert "Answers that the model wrote, test rows by language" in page.of["caption"]
    assert page.of["blockquote"][-3:] == ["Who <are> you?", "System: Be <brief>.", "User: कौन?"]
    assert "Model: वह" in page.of["p"]
    assert "वह" not in read(folder, texts=False).text


def test_a_run_with_metrics_alone_has_a_report(tmp_path: Path) -> None:
    page = read(model_folder(tmp_path / "out"))
    assert page.of["caption"][0] == "Scores of the test rows"
    assert page.named("svg") == []


@pytest.mark.more
def test_runs_are_compared_on_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (
        run_folder(tmp_path / "a/out"),
        run_folder(tmp_path / "b/out", recipe=RECIPE.replace("42", "43"), learns=0.4),
    )
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(one), str(other)]) == 0
    page = Read(Path("comparison.html").read_text(encoding="utf-8"))
    settings = [cell for cell in page.of["td"] if cell in ("42", "43")]
    assert settings == ["42", "43"]
    assert page.of["th"].count("seed") == 1
    assert "learning_rate" not in page.of["th"]
    assert {"a/out", "b/out"} <= {*page.of["th"]}
    assert sum(str(each.get("aria-label")).startswith("a/out: ") for each in page.named("svg")) == 3
    assert Path("comparison_figures/loss.png").is_file()
    assert str(tmp_path) not in page.text


def test_settings_are_compared_between_folders_that_have_some(tmp_path: Path) -> None:
    decided = f"{RECIPE}decided:\n  optim: adamw_torch\n"
    recipes = {"one": decided, "other": decided.replace("adamw_torch", "sgd")}
    runs = [read_run(model_folder(tmp_path / name, recipe=recipe)) for name, recipe in recipes.items()]
    evaluation = model_folder(tmp_path / "evaluation")
    (evaluation / "recipe.yaml").unlink()
    found = compared_settings([read_run(evaluation), *runs])
    assert found is not None
    assert (found.header, found.rows) == (["setting", "one", "other"], [["optim", "adamw_torch", "sgd"]])
    assert compared_settings([runs[0], read_run(evaluation)]) is None
    assert "decided" not in read(tmp_path / "one").text
    page = write_report([tmp_path / "one", evaluation], tmp_path / "both.html").read_text(encoding="utf-8")
    assert "learning_rate" not in page


def test_the_same_run_is_no_comparison(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "out")
    assert main(["report", str(folder), f"{folder}/", "--output_file", str(tmp_path / "one.html")]) == 0
    assert Read((tmp_path / "one.html").read_text(encoding="utf-8")).of["h1"] == ["out"]


@pytest.mark.parametrize(
    ("words", "code"),
    [([], "argument-missing"), (["{}", "--output_file", "x.pdf"], "report-not-html"),
     (["{}/nothing"], "report-needs-run"), (["{}", "--text", "false"], "unknown-name")],
)  # fmt: skip
def test_wrong_commands_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    (tmp_path / "train_log.jsonl").touch()
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 2
    assert f"[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize("content", ['{"test": {"kind', '{"test": {"kind": "single_label"}}', "[]"])
def test_an_evaluation_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (model_folder(tmp_path / "out") / "evaluation.json").write_text(content)
    assert main(["report", str(tmp_path / "out")]) == 2
    assert "evaluation.json" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Recipe({"output_dir": str(model_folder(tmp_path / "out"))}, Problems()), 0)
    (tmp_path / "out/report.html").mkdir()
    with caplog.at_level("WARNING"):
        report_run(run)
    assert f"indictune report {tmp_path}/out" in caplog.text
