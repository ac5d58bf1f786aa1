"""From a recipe file and flags to dataclasses, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from indictune.commands.predict import PredictFlags
from indictune.config.arguments import DataArguments, ModelArguments, SentimentTrainingArguments
from indictune.config.command_line import DECIDED, keep_command_line
from indictune.config.recipe import TRUST_FIELDS, Recipe, read_recipe, recorded_values, resolved
from indictune.errors import UserError
from indictune.files import RECIPE, write_yaml

RUN = (ModelArguments, DataArguments, SentimentTrainingArguments)

WriteRecipe = Callable[[str], str]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteRecipe:
    """A function: write the content to `r.yaml` in the present folder, and give its name."""
    monkeypatch.chdir(tmp_path)

    def write(content: str) -> str:
        (tmp_path / "r.yaml").write_text(content, encoding="utf-8")
        return "r.yaml"

    return write


def test_a_recipe_that_was_kept_is_read_once(recipe: WriteRecipe) -> None:
    argv = ["--config", recipe("learning_rate: 1e-3")]
    assert keep_command_line(argv).content == {"learning_rate": "1e-3"}
    recipe("learning_rate: 1.0")
    assert values(*argv) == {"learning_rate": 1e-3}
    assert values(*argv) == {"learning_rate": 1.0}


def read(*argv: str) -> Recipe:
    return read_recipe(argv, RUN)


def values(*argv: str) -> dict[str, Any]:
    given = read(*argv)
    assert given.problems == []
    return given.values


def found(*argv: str) -> list[tuple[str, str, Any]]:
    """Code, flag and value of each problem, where nothing else was given."""
    given = read(*argv)
    assert given.values == {}
    return [(each.code, each.flag, each.value) for each in given.problems]


def test_without_flags_all_values_are_defaults() -> None:
    given = read()
    assert (given.values, given.problems) == ({}, [])
    assert given.build(ModelArguments) == ModelArguments()


def test_the_command_line_wins_over_the_recipe(recipe: WriteRecipe) -> None:
    path = recipe("seed: 1\nmax_length: 64\n")
    assert values("--config", path, "--seed", "2") == {"seed": 2, "max_length": 64}
    assert values("--seed", "2", "--config", path) == {"seed": 2, "max_length": 64}


def test_the_last_of_two_equal_flags_counts() -> None:
    assert values("--seed", "1", "--seed", "2") == {"seed": 2}


def test_all_texts_to_label_count() -> None:
    read = read_recipe(["--text", "a", "b", "--model", "m", "--text", "c"], (PredictFlags,))
    assert read.values == {"text": ["a", "b", "c"], "model": "m"}


@pytest.mark.parametrize(
    "argv",
    [["--output_dir", "a b"], ["--output_dir=a b"], ["--output-dir", "a b"], ["--output-dir=a b"]],
)
def test_a_flag_is_written_with_or_without_equals_sign_and_hyphens(argv: list[str]) -> None:
    assert values(*argv) == {"output_dir": "a b"}


def test_only_the_first_equals_sign_and_the_hyphens_of_the_name_count() -> None:
    assert values("--run-name=a=b-c") == {"run_name": "a=b-c"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--max_steps", "-1"], {"max_steps": -1}),
        (["--seed=-3"], {"seed": -3}),
        (["--weight_decay", "-1e-4"], {"weight_decay": -1e-4}),
        (["--text_column", "-tweet"], {"text_column": "-tweet"}),
        (["--text_column=--tweet"], {"text_column": "--tweet"}),
        (["--label_map", "-1=bad", "0=", "1=good"], {"label_map": ["-1=bad", "0=", "1=good"]}),
    ],
)
def test_a_value_may_begin_with_a_dash(argv: list[str], expected: dict[str, Any]) -> None:
    assert values(*argv) == expected


def test_a_list_takes_one_word_or_several(recipe: WriteRecipe) -> None:
    assert values("--lora_target_modules", "query", "value") == {"lora_target_modules": ["query", "value"]}
    assert values("--lora_target_modules=query") == {"lora_target_modules": ["query"]}
    path = recipe("lora_target_modules: [query, value]\nreport_to: tensorboard\n")
    assert values("--config", path) == {"lora_target_modules": ["query", "value"], "report_to": ["tensorboard"]}


def test_a_list_of_the_command_line_replaces_that_of_the_recipe(recipe: WriteRecipe) -> None:
    path = recipe("lora_target_modules: [query, value]\n")
    assert values("--config", path, "--lora_target_modules", "key") == {"lora_target_modules": ["key"]}


def test_an_empty_list_of_a_recipe_stays_empty(recipe: WriteRecipe) -> None:
    assert values("--config", recipe("report_to: []\n")) == {"report_to": []}


@pytest.mark.parametrize(
    ("argv", "expected"), [(["--bf16"], True), (["--bf16", "true"], True), (["--bf16=false"], False)]
)
def test_a_switch_may_have_a_value(argv: list[str], expected: bool) -> None:
    assert values(*argv) == {"bf16": expected}


def test_a_switch_leaves_the_next_flag_alone() -> None:
    assert values("--bf16", "--seed", "3") == {"bf16": True, "seed": 3}


def test_a_recipe_holds_yaml_values_of_every_kind(recipe: WriteRecipe) -> None:
    path = recipe(
        "learning_rate: 1e-4\n"  # a string to YAML, which wants 1.0e-4
        "weight_decay: 0.01\n"
        "bf16: false\n"
        "verbose: yes\n"  # true to YAML
        "dropout: 0\n"
        "run_name: 17\n"
        "text_column: ट्वीट\n"
        "data_seed: null\n"
        "lr_scheduler_kwargs: {num_cycles: 2}\n"
    )
    assert values("--config", path) == {
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "bf16": False,
        "verbose": True,
        "dropout": 0.0,
        "run_name": "17",
        "text_column": "ट्वीट",
        "lr_scheduler_kwargs": '{"num_cycles": 2}',
    }
    args = read("--config", path, "--output_dir", "out").build(SentimentTrainingArguments)
    assert args.lr_scheduler_kwargs == {"num_cycles": 2}


@pytest.mark.parametrize(("written", "read_as"), [("on", "on"), ("off", "off"), ("'off'", "off"), ("auto", "auto")])
def test_on_and_off_are_no_booleans(recipe: WriteRecipe, written: str, read_as: str) -> None:
    assert values("--config", recipe(f"padding_free: {written}\n")) == {"padding_free": read_as}


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("output_dir: 010\n", {"output_dir": "010"}),
        ("train_file: 2024-01-01\n", {"train_file": "2024-01-01"}),
        ("train_file: 2026-13-45\n", {"train_file": "2026-13-45"}),
        ("label_column: no\ntext_column: Yes\n", {"label_column": "no", "text_column": "Yes"}),
        ("run_name: 1_0\ntext_column: 1:30\n", {"run_name": "1_0", "text_column": "1:30"}),
        ("lora_target_modules: [on, 0x1F]\n", {"lora_target_modules": ["on", "0x1F"]}),
        ("text_column: 'null'\nlabel_column: ''\nseed: ~\n", {"text_column": "null", "label_column": ""}),
        ("seed: 010\nsave_strategy: no\n", {"seed": 10, "save_strategy": "no"}),
        ("lr_scheduler_kwargs: {a: {b: 1.5}, c: yes}\n", {"lr_scheduler_kwargs": '{"a": {"b": 1.5}, "c": true}'}),
        ("lr_scheduler_kwargs: {a: 2024-01-01}\n", {"lr_scheduler_kwargs": '{"a": "2024-01-01"}'}),
    ],
)
def test_a_text_of_a_recipe_stays_as_it_is_written(recipe: WriteRecipe, written: str, read_as: dict[str, Any]) -> None:
    """As on the command line, even if YAML 1.1 reads it differently."""
    assert values("--config", recipe(written)) == read_as


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "name", ["learning_rate", "weight_decay", "max_grad_norm", "max_bad_fraction", "warmup_steps"]
)
def test_a_number_is_finite(recipe: WriteRecipe, name: str, number: str) -> None:
    assert found(f"--{name}={number}") == [("not-finite", f"--{name}", number)]
    path = recipe(f"{name}: {number}\n")
    assert found("--config", path) == [("not-finite", f"r.yaml: {name}", number)]


def test_derived_values_win_over_given_ones() -> None:
    assert read("--lora_r", "4").build(ModelArguments, lora_r=8).lora_r == 8


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("flag", "nearest"),
        [
            ("--lerning_rate", "`--learning_rate`"),
            ("--learning", "`--learning_rate`"),  # the beginning of a flag is no flag
            ("--confg", "`--config`"),
            ("--xyzzy", "`--help`"),
        ],
    )
    def test_a_flag_is_answered_with_the_nearest_one(self, flag: str, nearest: str) -> None:
        (each,) = read(flag, "1").problems
        assert (each.code, each.flag) == ("unknown-name", flag)
        assert nearest in str(each)

    def test_a_recipe_key_is_answered_with_the_file_and_the_nearest_one(self, recipe: WriteRecipe) -> None:
        (each,) = read("--config", recipe("txt_column: tweet\n")).problems
        assert (each.code, each.flag) == ("unknown-name", "r.yaml: txt_column")
        assert "`text_column`" in str(each)
        assert "--config" not in str(read("--config", recipe("confg: 1\n")).problems[0])

    def test_a_word_without_a_flag_is_refused(self) -> None:
        given = read("train.csv", "--seed", "1")
        assert [(each.code, each.value) for each in given.problems] == [("bare-word", "train.csv")]
        assert given.values == {"seed": 1}

    def test_a_problem_is_one_line_without_control_characters(self) -> None:
        (each,) = read_recipe(["a\tb\r"], (DataArguments,)).problems
        assert "`a\\tb\\r`" in str(each)


class TestWrongValues:
    @pytest.mark.parametrize(
        ("argv", "flag", "value"),
        [
            (["--max_length", "long"], "--max_length", "long"),
            (["--learning_rate", "fast"], "--learning_rate", "fast"),
            (["--method", "quantum"], "--method", "quantum"),
            (["--output_dir"], "--output_dir", ""),
            (["--lora_target_modules"], "--lora_target_modules", ""),
            (["--output_dir", "my", "run"], "--output_dir", "my run"),
            (["--bf16", "maybe"], "--bf16", "maybe"),
        ],
    )
    def test_flag_and_value_are_named(self, argv: list[str], flag: str, value: str) -> None:
        assert found(*argv) == [("wrong-type", flag, value)]

    def test_a_value_of_a_recipe_is_named_with_the_file(self, recipe: WriteRecipe) -> None:
        assert found("--config", recipe("seed: [1, 2]\n")) == [("wrong-type", "r.yaml: seed", "1 2")]

    def test_a_choice_names_the_choices(self) -> None:
        (each,) = read("--method", "quantum").problems
        assert all(choice in str(each) for choice in ("full", "lora", "qlora"))

    def test_a_value_that_the_dataclass_refuses_is_the_users_error(self) -> None:
        given = read("--output_dir", "out", "--eval_strategy", "sometimes")
        with pytest.raises(UserError, match="sometimes is not a valid IntervalStrategy"):
            given.build(SentimentTrainingArguments)


class TestRecipeFile:
    def test_a_missing_file_is_refused(self) -> None:
        assert [each[:2] for each in found("--config", "no/such.yaml")] == [("no-such-file", "--config")]

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        assert [each[:2] for each in found("--config", str(tmp_path))] == [("unreadable", "--config")]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            ("seed: 1\nlearning_rate: 1e-5\nseed: 2\n", "(line 3, column 1)"),
            ("'seed': 1\nseed: 1\n", "(line 2, column 1)"),
            ("lr_scheduler_kwargs: {a: 1, a: 2}\n", "(line 1, column 29)"),
            ("? [a]\n: 1\n", "unhashable key"),
            ("seed: 1\nreport_to: [none\n", "line 3"),
            (f"report_to: {'[' * 20_000}", "nested too deeply"),
        ],
    )
    def test_broken_yaml_is_refused_with_its_line(self, recipe: WriteRecipe, content: str, reason: str) -> None:
        (each,) = read("--config", recipe(content)).problems
        assert (each.code, each.flag) == ("not-yaml", "--config")
        assert reason in str(each)
        assert "\n" not in str(each)

    @pytest.mark.parametrize(
        ("content", "kind"), [("- seed\n- 1\n", "list"), ("just words\n", "str"), ("# empty\n", "NoneType")]
    )
    def test_a_file_without_keys_is_refused(self, recipe: WriteRecipe, content: str, kind: str) -> None:
        (each,) = read("--config", recipe(content)).problems
        assert (each.code, each.details["found"]) == ("recipe-not-a-mapping", kind)

    def test_bytes_that_are_not_utf8_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "r.yaml").write_bytes(b"run_name: \xff\n")
        (each,) = read("--config", str(tmp_path / "r.yaml")).problems
        assert each.code == "unreadable"
        assert "0xff" in str(each)


class TestDataSource:
    RECIPE = "train_file: a.csv\nvalidation_file: b.csv\ntest_file: c.csv\nmax_length: 64\n"
    DATASET = "dataset_name: owner/set\ndataset_config_name: hi\ntext_column: tweet\n"

    @pytest.mark.parametrize("flag", ["train_file", "validation_file", "test_file"])
    def test_naming_one_file_drops_all_files_of_the_recipe(self, recipe: WriteRecipe, flag: str) -> None:
        given = values("--config", recipe(self.RECIPE), f"--{flag}", "new.csv")
        assert given == {flag: "new.csv", "max_length": 64}

    @pytest.mark.parametrize("flag", ["train_file", "validation_file", "test_file"])
    def test_naming_a_file_drops_the_dataset_of_the_recipe(self, recipe: WriteRecipe, flag: str) -> None:
        given = values("--config", recipe(self.DATASET), f"--{flag}", "new.csv")
        assert given == {flag: "new.csv", "text_column": "tweet"}

    def test_naming_a_dataset_drops_the_files_of_the_recipe(self, recipe: WriteRecipe) -> None:
        given = values("--config", recipe(self.RECIPE), "--dataset-name", "builtin:tweets")
        assert given == {"dataset_name": "builtin:tweets", "max_length": 64}

    def test_other_flags_drop_nothing(self, recipe: WriteRecipe) -> None:
        given = values("--config", recipe("train_file: a.csv\ntest_file: c.csv\n"), "--max_length", "32")
        assert given == {"train_file": "a.csv", "test_file": "c.csv", "max_length": 32}


def test_all_problems_of_file_and_flags_come_at_once_and_good_values_stay(recipe: WriteRecipe) -> None:
    given = read(
        "--config", recipe("sed: 1\nmax_length: long\nlora_r: 4\n"), "--bf17", "--seed", "x", "--lora_alpha=8"
    )
    assert [(each.code, each.flag) for each in given.problems] == [
        ("unknown-name", "r.yaml: sed"),
        ("wrong-type", "r.yaml: max_length"),
        ("unknown-name", "--bf17"),
        ("wrong-type", "--seed"),
    ]
    assert given.values == {"lora_r": 4, "lora_alpha": 8}


def test_flags_are_still_checked_where_the_recipe_is_missing() -> None:
    given = read("--config", "no.yaml", "--sed", "1")
    assert [each.code for each in given.problems] == ["no-such-file", "unknown-name"]


def test_an_unreadable_recipe_differs_from_no_recipe(recipe: WriteRecipe) -> None:
    assert read().is_read
    assert read("--config", recipe("sed: 1\n")).is_read
    assert not read("--config", recipe("a: [\n")).is_read


# Every kind of value that a field can hold; not the default, if another value is valid here.
FULL_RECIPE = """
output_dir: out dir
train_file: ट्रेन.csv
validation_file: v.csv
text_column: -tweet
language_column: lang
max_length: 64
dropout: 0
lora_target_modules: [query, value]
learning_rate: 1e-4
adam_epsilon: 1.0e-7
lr_scheduler_type: cosine_with_restarts
lr_scheduler_kwargs: {num_cycles: 2}
warmup_steps: 0.1
bf16: true
report_to: [tensorboard]
eval_strategy: steps
save_strategy: steps
eval_steps: 5
save_steps: 10
logging_steps: 0.1
class_weights: balanced
early_stopping_patience: 3
label_smoothing_factor: 0.1
activation_checkpointing: true
activation_checkpointing_kwargs: {use_reentrant: false}
optim: sgd
debug: [underflow_overflow]
data_seed: 3
"""


def build(given: Recipe) -> list[Any]:
    """The three dataclasses, on the CPU, which the machine decides and no recipe records."""
    on_cpu = given.build(SentimentTrainingArguments, use_cpu=True)
    return [given.build(ModelArguments), given.build(DataArguments), on_cpu]


@pytest.mark.parametrize("content", ["output_dir: out\ndataset_name: builtin:tweets\n", FULL_RECIPE])
def test_a_resolved_run_reads_back_to_the_same_dataclasses(recipe: WriteRecipe, tmp_path: Path, content: str) -> None:
    given = read("--config", recipe(content))
    assert given.problems == []
    run = build(given)
    write_yaml(tmp_path / RECIPE, resolved(*run))
    again = read("--config", str(tmp_path / "recipe.yaml"))
    assert again.problems == []
    for before, after in zip(run, build(again), strict=True):
        for field in dataclasses.fields(before):
            assert getattr(after, field.name) == getattr(before, field.name), field.name


def test_derived_values_are_recorded_and_not_read_back(tmp_path: Path) -> None:
    """Another may have another launch or machine, validation rows, or another metric."""
    steps = ("--eval_strategy", "steps", "--eval_steps", "10", "--save_strategy", "steps")
    given = read("--output_dir", "out", *steps, "--seed", "3", "--metric_for_best_model", "loss")
    decided = {"eval_strategy": "no", "load_best_model_at_end": False, "optim": "paged_adamw_8bit"}
    run = given.build(SentimentTrainingArguments, **decided, use_cpu=True)
    write_yaml(tmp_path / RECIPE, given.to_record([run], {*decided, "use_cpu"}))
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text(encoding="utf-8"))
    assert written.keys() == resolved(run).keys() - written[DECIDED].keys() | {DECIDED, "eval_strategy"}
    assert written[DECIDED].items() >= {**decided, "greater_is_better": False}.items()
    assert recorded_values(written) == resolved(run)
    again = read("--config", str(tmp_path / "recipe.yaml"), "--metric_for_best_model", "accuracy")
    assert again.problems == []
    assert {name: again.values.get(name) for name in (*decided, "seed")} == {
        "eval_strategy": "steps", "load_best_model_at_end": None, "optim": None, "seed": 3,
    }  # fmt: skip
    assert again.build(SentimentTrainingArguments, use_cpu=True).greater_is_better


def test_resolved_holds_every_field_but_secrets_and_what_a_rank_decides(recipe: WriteRecipe) -> None:
    given = read("--config", recipe(FULL_RECIPE))
    run = build(given)
    written = resolved(*run)
    fields = {field.name for instance in run for field in dataclasses.fields(instance) if field.init}
    assert fields - written.keys() == {
        *("hub_token", "local_rank", "use_cpu", "accelerator_config", "deepspeed"),
        *("trust_remote_code", "trust_checkpoint"),
        *("gradient_accumulation_steps", "resume_from_checkpoint", "allow_cpu"),
    }


@pytest.mark.parametrize("name", TRUST_FIELDS)
class TestTrust:
    def test_is_refused_in_a_recipe_with_any_flag(self, recipe: WriteRecipe, name: str) -> None:
        path = recipe(f"{name}: true\n")
        for flags in ((), (f"--{name}", "true")):
            given = read("--config", path, *flags)
            assert [(each.code, each.flag) for each in given.problems] == [("trust-in-file", f"r.yaml: {name}")]
            assert given.values == dict.fromkeys([name] if flags else [], True)

    def test_false_in_a_recipe_is_ignored(self, recipe: WriteRecipe, name: str) -> None:
        for none in ("false", "False"):
            given = read("--config", recipe(f"{name}: {none}\n"), f"--{name}", "true")
            assert (given.problems, given.values) == ([], {name: True})
