"""An adapter that learned pairs of answers, by every verb that takes a finished run."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from html import escape
from pathlib import Path

import pytest
import yaml

from indictune.cli import main
from indictune.report.report_page import write_report, write_without_texts
from tests.faults.hub import Hub
from tests.hub.conftest import server  # noqa: F401, a fixture
from tests.ranks.test_tasks import JOB, write_answer_pairs

BLOCKS = re.compile(r"---\n(.*?)\n---\n.*```bash\n(.*?)```", flags=re.DOTALL)  # of a card: metadata, and its command


@pytest.mark.more
def test_the_verbs_take_a_run_of_pairs(
    tmp_path: Path,
    server: Hub,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path))
    Path("job.yaml").write_text(JOB + write_answer_pairs(tmp_path), encoding="utf-8")
    flags = ["--method", "lora", "--learning_rate", "1e-2", "--max_steps", "3", "--num_sample_generations", "2"]
    assert main(["train", "dpo", "--config", "job.yaml", *flags, "--beta", "0.2", "--output_dir", "run"]) == 0
    capfd.readouterr()
    assert main(["plan", "job.yaml", "--task", "dpo", *flags, "--gpus", "1", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["run"]["row_tokens"]["read_first"] == 0  # the reference is cached
    assert main(["prepare", "--config", "job.yaml"]) == 0
    splits = [line for line in capfd.readouterr().out.splitlines() if line.startswith(("train", "validation"))]
    assert [line.split()[-1] for line in splits] == ["0.0%"] * 2  # at the limit of tokens
    assert main(["merge", "run", "--output_dir", "merged"]) == 0
    trained = json.loads(Path("run/metrics.json").read_text(encoding="utf-8"))["eval"]

    def answer(folder: str) -> str:
        capfd.readouterr()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"good film\n")))
        assert main(["chat", folder, "--max_new_tokens", "8"]) == 0
        return capfd.readouterr().out

    assert answer("run") == answer("merged")
    assert main(["evaluate", "run", "--test_file", "validation.jsonl"]) == 2
    assert "[pairs-not-scored]" in capfd.readouterr().err
    for folder in ("run", "merged"):
        columns = ["--columns", "completion=chosen"]
        assert main(["evaluate", folder, "--test_file", "validation.jsonl", *columns, "--output_dir", "of"]) == 0
        scored = json.loads(Path("of/metrics.json").read_text(encoding="utf-8"))["test"]
        assert scored["num_tokens"] == trained["chosen_tokens"]

    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text(encoding="utf-8").splitlines()]
    lengths = json.loads(Path("run/metrics.json").read_text(encoding="utf-8"))["answer_lengths"]
    assert 0 < lengths["before"] <= 4  # --max_new_tokens
    page = write_report([Path("run")]).read_text(encoding="utf-8")
    (worst, *_) = json.loads(Path("run/mistakes.json").read_text(encoding="utf-8"))["eval"]
    row = json.loads(Path("validation.jsonl").read_text(encoding="utf-8").splitlines()[worst["number"]])
    assert (worst["text"], worst["chosen"], worst["rejected"]) == (row["prompt"], row["chosen"], row["rejected"])
    mean = f"<td>{trained['chosen_tokens'] / 53:.1f}</td>"
    written = [f"<td>{lengths[name]:.1f}</td>" for name in ("reference", "before", "after")]
    for part in (row["chosen"], row["rejected"], mean, *written, *(escape(each["answer_before"]) for each in samples)):
        assert part in page

    assert write_without_texts(Path("run"), Path("public"))
    public = Path("public/report.html").read_text(encoding="utf-8")
    assert mean in public
    assert not any(text in public for text in (row["chosen"], row["rejected"], samples[0]["reference"]))

    assert main(["push", "merged", "me/pairs"]) == 0
    found = BLOCKS.match(server.files["README.md"].decode())
    assert found is not None
    about = yaml.safe_load(found[1])
    assert about["tags"] == ["indictune", "dpo"]
    assert not {"chosen_tokens", "rejected_tokens"} & set(about["metrics"])
    for line in ("| beta, which holds the model to that before training | 0.2 |", "| loss of a pair | sigmoid |"):
        assert line in found[0]
    _, *command = shlex.split(found[2].replace("\\\n", " "))
    assert main([*command, "--output_dir", "again"]) == 0
    again = json.loads(Path("again/metrics.json").read_text(encoding="utf-8"))["eval"]
    assert again == trained
