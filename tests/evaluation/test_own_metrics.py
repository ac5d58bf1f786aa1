"""`--metrics`: scores of the package `evaluate` beside those that every run has."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from seqeval.metrics import f1_score as entity_f1
from sklearn.metrics import hamming_loss, matthews_corrcoef, mean_squared_error

from indictune.config.recipe import read_recipe
from indictune.evaluation.own_metrics import FLAG, INVENTED, own_metric, score_rows
from indictune.hub.card_facts import group_cells
from indictune.preflight.derive import make_plan
from indictune.preflight.values import METRIC, check_metric
from indictune.tasks.chat import Chat
from indictune.tasks.classification import Classification
from indictune.tasks.protocol import Task
from indictune.tasks.tokens import TokenClassification
from indictune.training.evaluation import scores_by_metrics
from tests.conftest import FinishedRun
from tests.evaluation.test_score_names import LANGUAGES, PREDICTED, REFERENCES, objective_of
from tests.plans import codes, plan_of
from tests.ranks.launching import SCRIPT, Run, accelerate, distance, python, start
from tests.refusals import refused

INT, FLOAT, TEXT = (f"datasets.Value('{each}')" for each in ("int32", "float64", "string"))
MCC = (
    "from sklearn.metrics import matthews_corrcoef\n        return {'mcc': matthews_corrcoef(references, predictions)}"
)


def metric_file(folder: Path, body: str, of: str = INT, name: str = "own") -> str:
    """A metric in the layout of `evaluate`: a class in `name/name.py`, which returns what `body` returns."""
    file = folder / name / f"{name}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f"import datasets\nimport evaluate\n\n\nclass Own(evaluate.Metric):\n    def _info(self):\n"
        f"        features = datasets.Features({{'predictions': {of}, 'references': {of}}})\n"
        "        return evaluate.MetricInfo('', '', features)\n\n"
        f"    def _compute(self, predictions, references):\n        {body}\n",
        encoding="utf-8",
    )
    return str(file)


@pytest.fixture(scope="module", autouse=True)
def _own_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Copies that `evaluate` keeps of metrics."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        yield


def of_metrics(given: list[str], task: Task[Any, Any, Any] | None = None, trusts: bool = True, **training: Any) -> Any:
    """What the check of a plan says of these metrics."""
    plan = plan_of({"metrics": given, **training}, {"trust_remote_code": trusts})
    return check_metric(plan, task or Classification())


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_score_is_that_of_the_library_for_all_rows_and_for_each_language(tmp_path: Path, as_folder: bool) -> None:
    file = metric_file(tmp_path, MCC, name=f"mcc_{as_folder}")
    given = str(Path(file).parent) if as_folder else file
    assert of_metrics([given]) == []
    objective, rows, results = objective_of("single")
    sides = objective.compared(rows, results)
    assert sides is not None
    found = score_rows([given], sides, LANGUAGES)
    assert found.overall == {"mcc": pytest.approx(matthews_corrcoef(REFERENCES, PREDICTED))}
    tamil = slice(2, 4)
    assert found.by_language["ta"] == {"mcc": pytest.approx(matthews_corrcoef(REFERENCES[tamil], PREDICTED[tamil]))}
    beside = found.beside(objective.breakdown(rows, results, draws=10))
    assert beside.overall.scores["mcc"].value == found.overall["mcc"]
    assert group_cells(beside.overall, ["mcc"], 4) == ["6", f"{found.overall['mcc']:.4f}"]  # without an interval
    assert group_cells(beside.by["length"]["1-16"], ["mcc"], 4)[1:] == [""]
    block = objective.metrics(beside)
    found.add_to(block)
    assert (block["mcc"], block["per_language"]["ta"]["mcc"]) == (found.overall["mcc"], found.by_language["ta"]["mcc"])


def test_rows_of_every_task_reach_a_metric(tmp_path: Path) -> None:
    seqeval = "from seqeval.metrics import f1_score\n        return {'own_f1': f1_score(references, predictions)}"
    bodies = {
        "multi": (f"[{INT}]", "return {'cells': len(predictions) * len(predictions[0])}"),
        "regression": (FLOAT, "return {'first': predictions[0] - references[1]}"),
        "tags": (f"[{TEXT}]", seqeval),
    }
    given = {kind: metric_file(tmp_path, body, of, kind) for kind, (of, body) in bodies.items()}
    found = {}
    for kind, file in given.items():
        objective, rows, results = objective_of(kind)
        sides = objective.compared(rows, results)
        assert sides is not None
        assert objective.compared(rows, None) == (sides[1], sides[1])
        found[kind] = (*sides, score_rows([file], sides, LANGUAGES).overall)
    predicted, right, scores = found["multi"]
    assert hamming_loss(right, predicted) == pytest.approx(2 * (REFERENCES != PREDICTED).mean() / 3)
    assert scores == {"cells": 18}
    predicted, right, scores = found["regression"]
    assert mean_squared_error(right, predicted) == pytest.approx(((REFERENCES - PREDICTED) ** 2).mean())
    assert scores == {"first": -1.0}
    predicted, right, scores = found["tags"]
    assert right[0] == ["O", "O"]
    assert scores == {"own_f1": pytest.approx(entity_f1(right, predicted))}
    texts = metric_file(tmp_path, "return {'words': sum(len(each.split()) for each in predictions)}", TEXT, "texts")
    assert score_rows([texts], (["एक दो", "three"], ["", ""]), ["hi", "en"]).by_language["hi"] == {"words": 2}
    answers, rows, results = objective_of("answers")
    assert answers.compared(rows, results) is None


WRONG = {
    "raises": "raise RuntimeError('no such luck')",
    "exits": "raise SystemExit(3)",
    "nothing": "return None",
    "no_number": "return {'matrix': [[1, 0], [0, 1]], 'word': 'good'}",
    "nan": "return {'score': float('nan')}",
    "infinite": "return {'score': float('inf'), 'other': 1}",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_metric_that_fails_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    file = metric_file(tmp_path, WRONG[name], name=name)
    (found,) = of_metrics([file])
    assert (found.code, found.flag, found.value) == ("metric-fails", FLAG, file)


@pytest.mark.parametrize(
    "taken", ["accuracy", "macro_f1", "macro_f1_hi", "f1_good", "loss", "num_examples", "runtime"]
)
def test_a_score_that_takes_the_name_of_another_is_refused(tmp_path: Path, taken: str) -> None:
    file = metric_file(tmp_path, f"return {{'{taken}': 1}}", name=f"takes_{taken}")
    (found,) = of_metrics([file])
    assert (found.code, found.value, found.details["name"]) == ("metric-name-taken", file, taken)


def test_all_problems_of_metrics_come_at_once_and_first_whether_their_code_may_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    wrong = metric_file(tmp_path, f"open('{ran}', 'w')\n        raise ValueError('wrong')", name="wrong")
    again = metric_file(tmp_path, "return {'mcc': 1}", name="again")
    mcc = metric_file(tmp_path, MCC, name="first")
    given = [wrong, mcc, again, str(tmp_path / "missing.py"), "no_such_metric"]
    assert codes(of_metrics(given, trusts=False)) == [("metric-not-trusted", FLAG)] * 5
    assert not ran.exists()
    assert [(each.code, each.value) for each in of_metrics(given)] == [
        ("metric-fails", wrong), ("metric-name-taken", again), ("metric-not-loaded", given[3]),
        ("metric-not-loaded", "no_such_metric"),
    ]  # fmt: skip
    (tmp_path / "broken.py").write_text("def _compute(:\n", encoding="utf-8")
    assert codes(of_metrics([str(tmp_path / "broken.py")])) == [("metric-not-loaded", FLAG)]


def test_a_task_without_predictions_refuses_metrics(tmp_path: Path) -> None:
    file = metric_file(tmp_path, "return {'words': 1}", TEXT, "words")
    plan = plan_of({"metrics": [file]}, {"trust_remote_code": True})
    vars(plan.data)["num_sample_generations"] = 0
    assert codes(check_metric(plan.derive(metric_for_best_model="loss"), Chat())) == [
        ("metric-without-predictions", FLAG)
    ]
    vars(plan.data)["num_sample_generations"] = 5
    assert check_metric(plan.derive(metric_for_best_model="loss"), Chat()) == []
    assert codes(of_metrics([file], TokenClassification(), metric_for_best_model="f1")) == [("metric-fails", FLAG)]

    assert set(INVENTED) == {
        "texts", "tags", "regression", "multi_label_classification", "single_label_classification",
    }  # fmt: skip


def test_checkpoints_are_compared_by_such_a_score_once_its_direction_is_given(tmp_path: Path) -> None:
    name = "loss_of_face"  # which begins like a score that is best where it is lowest
    file = metric_file(tmp_path, f"return {{'{name}': 1.0, 'other': 0}}", name="direction")
    assert codes(of_metrics([file], metric_for_best_model=f"eval_{name}")) == [("metric-without-direction", METRIC)]
    for direction in (True, False):
        assert of_metrics([file], metric_for_best_model=f"eval_{name}", greater_is_better=direction) == []
        flags = ["--train_file", "rows.jsonl", "--output_dir", str(tmp_path), "--metrics", file]
        flags += ["--metric_for_best_model", name, "--greater_is_better", str(direction)]
        plan, problems = make_plan(read_recipe(flags, Classification.arguments), {}, Classification())
        assert "worst-as-best" not in [each.code for each in problems]
        assert plan.training.greater_is_better is direction
    assert codes(of_metrics([file], metric_for_best_model="loss_of_fac")) == [("metric-unknown", METRIC)]


def test_rows_of_a_failed_call_are_not_scored_by_the_next_one(tmp_path: Path) -> None:
    metric = own_metric(metric_file(tmp_path, "return {'rows': len(predictions)}", name="counts"))
    assert metric.scores([0, 1], [0, 1], "two rows") == {"rows": 2}
    for predictions in (["a", "b", "c"], [0, 1, "c"], [0]):
        with refused("metric-fails", "counts", flag=FLAG):
            metric.scores(predictions, [0, 1, 2], "three rows")
        assert metric.scores([0, 1, 1, 0], [0, 1, 1, 1], "four rows") == {"rows": 4}


def test_a_language_whose_rows_a_metric_refuses_has_no_number(tmp_path: Path) -> None:
    file = metric_file(tmp_path, "return {'inverse': 1 / (len(references) - 1)}", name="of_two")
    found = score_rows([file], ([0, 1, 1], [0, 1, 1]), ["hi", "hi", "ta"])
    assert found.overall == {"inverse": 0.5}
    assert found.by_language["hi"] == {"inverse": 1}
    assert math.isnan(found.by_language["ta"]["inverse"])


def test_what_a_metric_draws_changes_no_training(tmp_path: Path) -> None:
    body = "import random, numpy, torch\n        random.random(), numpy.random.rand(), torch.manual_seed(1)"
    file = metric_file(tmp_path, f"{body}\n        return {{'score': 1}}", name="draws")
    args = SimpleNamespace(metrics=[file], process_index=0)
    trainer: Any = SimpleNamespace(args=args, state=SimpleNamespace(global_step=0))
    before = torch.get_rng_state()
    assert scores_by_metrics(trainer, ([0, 1], [0, 1]), ["hi", "ta"]) is not None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.more
def test_a_metric_of_the_hub_is_fetched_once_and_then_used_without_a_network(tmp_path: Path) -> None:
    """`mcc` is `matthews_correlation` there: a Space of `evaluate-metric`."""
    name = "matthews_correlation"
    body = MCC.replace("'mcc'", f"'{name}'")
    file = Path(metric_file(tmp_path, body, name=name))
    served = tmp_path / "spaces/evaluate-metric" / name / "resolve/main"
    served.mkdir(parents=True)
    file.rename(served / file.name)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = "import sys; from indictune.evaluation.own_metrics import own_metric\n"
        program += "print(own_metric(sys.argv[1]).scores([0, 1, 2, 1], [0, 1, 2, 2], 'rows'))"
        online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
        for variables in (online, {}):
            result = start([*python(), "-c", program, "mcc"], variables)
            assert result.returncode == 0, result.stderr
            assert json.loads(result.stdout.replace("'", '"')) == {name: pytest.approx(0.7)}
        server.shutdown()


MCC_OR_FAIL = """from sklearn.metrics import matthews_corrcoef
        if predictions != references:
            raise RuntimeError('no such luck')
        return {'mcc': matthews_corrcoef(references, predictions)}"""


@pytest.mark.more
def test_a_metric_that_fails_in_an_evaluation_loses_no_training(finished_run: FinishedRun, tmp_path: Path) -> None:
    """It passes when right answers stand for predictions. Without it, or mended, the run goes on to the same model."""
    out, file = tmp_path / "out", metric_file(tmp_path, MCC_OR_FAIL)
    flags = ["--config", str(finished_run.recipe), "--output_dir", str(out), "--trust_remote_code", "true"]
    flags += ["--metrics", file, "--metric_for_best_model", "mcc", "--greater_is_better", "true"]
    failed = start([*python(), SCRIPT, *flags])
    assert failed.returncode == 2, failed.stderr
    assert "[metric-fails]" in failed.stderr
    assert file in failed.stderr
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"]
    assert json.loads((out / "status.json").read_text(encoding="utf-8"))["state"] == "user_error"
    metric_file(tmp_path, MCC)
    resumed = start([*python(), SCRIPT, *flags, "--resume_from_checkpoint", "auto"])
    assert resumed.returncode == 0, resumed.stderr
    state = json.loads((out / "checkpoint-8/trainer_state.json").read_text(encoding="utf-8"))
    evaluations = [row["eval_mcc"] for row in state["log_history"] if "eval_mcc" in row]
    assert len(evaluations) == 2
    assert state["best_metric"] == max(evaluations)
    whole = load_file(finished_run.folder / "checkpoint-8/model.safetensors")
    assert distance(load_file(out / "checkpoint-8/model.safetensors"), whole) == 0
    rows = [json.loads(line) for line in (out / "predictions.jsonl").read_text(encoding="utf-8").splitlines()]
    tested = [row for row in rows if row["split"] == "test"]
    right, predicted = ([row[name] for row in tested] for name in ("label", "predicted"))
    block = Run(out).metrics["test"]
    assert block["mcc"] == pytest.approx(matthews_corrcoef(right, predicted))
    assert {"mcc"} <= block["per_language"]["hi"].keys()
    assert "name: mcc" in (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.more
def test_the_evaluate_command_adds_metrics_and_a_failing_one_leaves_no_numbers(
    finished_run: FinishedRun, tmp_path: Path
) -> None:
    model, rows = finished_run.folder, finished_run.folder.parent / "test.jsonl"
    file = metric_file(tmp_path, MCC)
    command = [*python(), "indictune/__main__.py", "evaluate", "--model", str(model), "--test_file", str(rows)]
    command += ["--output_dir", str(tmp_path / "out"), "--metrics", file]
    untrusted = start(command)
    assert untrusted.returncode == 2
    assert "[metric-not-trusted]" in untrusted.stderr
    done = start([*command, "--trust_remote_code", "true"])
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out/predictions.jsonl").read_text(encoding="utf-8").splitlines()
    right, predicted = ([json.loads(line)[name] for line in lines] for name in ("label", "predicted"))
    assert Run(tmp_path / "out").metrics["test"]["mcc"] == pytest.approx(matthews_corrcoef(right, predicted))
    metric_file(tmp_path, MCC_OR_FAIL)
    failed = start([*command[:-3], str(tmp_path / "other"), "--metrics", file, "--trust_remote_code", "true"])
    assert failed.returncode == 2, failed.stderr
    assert "[metric-fails]" in failed.stderr
    assert not list((tmp_path / "other").glob("*.json*l")) + list((tmp_path / "other").glob("metrics.json"))


@pytest.mark.more
def test_answers_that_a_model_writes_are_scored_by_metrics_too(tmp_path: Path) -> None:
    body = "return {'answers': len(predictions), 'right_words': sum(len(each.split()) for each in references)}"
    file = metric_file(tmp_path, body, TEXT)
    flags = ["--config", "recipes/llama/demo.yaml", "--output_dir", str(tmp_path / "out"), "--max_steps", "2"]
    flags += [
        "--num_sample_generations",
        "3",
        "--max_new_tokens",
        "2",
        "--metrics",
        file,
        "--trust_remote_code",
        "true",
    ]
    flags += ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
    flags += ["--metric_for_best_model", "answers", "--greater_is_better", "true"]
    done = start([*python(), "scripts/train_llama.py", *flags])
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out/samples.jsonl").read_text(encoding="utf-8").splitlines()]
    block = Run(tmp_path / "out").metrics["eval"]
    assert block["answers"] == len(answers) == 3
    assert block["right_words"] == sum(len(answer["reference"].split()) for answer in answers)


@pytest.mark.more
def test_two_ranks_give_the_numbers_of_one_process(finished_run: FinishedRun, tmp_path: Path) -> None:
    """11 rows in batches of 4 a rank. The metric notes what it gets: all rows once, in their order, on one process."""
    file, noted = (
        metric_file(tmp_path, f"open({str(tmp_path / 'noted')!r}, 'a').write(f'{{references}}\\n')\n        {MCC}"),
        {},
    )
    flags = ["--model", str(finished_run.folder), "--test_file", str(finished_run.folder.parent / "test.jsonl")]
    flags += ["--per_device_eval_batch_size", "4", "--metrics", file, "--trust_remote_code", "true", "--output_dir"]
    for name, launcher in (("one", python()), ("two", accelerate("ddp", 2))):
        done = start([*launcher, "indictune/__main__.py", "evaluate", *flags, str(tmp_path / name)])
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / "noted").read_text(encoding="utf-8").splitlines()
        noted[name] = [line for line in lines if line != "[0, 1]"]  # two invented rows, on each rank
        (tmp_path / "noted").unlink()
    assert noted["one"] == noted["two"]
    assert len(json.loads(noted["one"][0])) == 11
    one, two = (Run(tmp_path / name).metrics["test"] for name in ("one", "two"))
    assert one["mcc"] == two["mcc"]
    assert one["per_language"] == two["per_language"]
