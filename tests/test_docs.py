"""What the documents tell a reader to type and to open works: commands run, flags and paths exist, pages are fresh."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from docs import demo_output, house_map, install_sizes, plan_tables, strategy_files
from docs.generate import COMMANDS, FLAGS_FILE, PAGES, TRAINING, flags_file
from indictune.cli import main
from indictune.commands.train import read_asked
from indictune.config.recipe import read_recipe
from indictune.distributed.launch import read_deepspeed
from indictune.errors import problems_of
from indictune.tasks.protocol import Task
from indictune.versions import strategies
from tests.ranks.launching import ROOT, free_port, python, start
from tests.test_recipes import RECIPES as RECIPES_OF_KNOWN_FLAGS

NAVIGATION = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.MULTILINE)
PAGES_BY_HAND = [ROOT / "docs" / name for name in NAVIGATION if name not in PAGES]
DOCUMENTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *PAGES_BY_HAND]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
BLOCK = re.compile(r"(?:<!-- (?P<mark>\w+) -->\n)?```(?P<language>\w*)\n(?P<content>.*?)```", re.DOTALL)
MARKS = {"run", "gpu", "nodes", "setup"}  # run by a test; needs GPUs; needs nodes; installs, builds or takes minutes
IN_REPOSITORY = r"(?:indictune|scripts|accelerate_configs|ds_configs|recipes|benchmarks|docs|tests)/[\w./-]*\w"
WORDS_OF_README = 900
WORDS_OF_SENTENCE = 25
SECTIONS = ["Start", "Your data", "Train", "Scale", "Use", "Reference", "Evidence", "Inside"]
ODD_WORDS = re.compile(r"\b(?:told|tells|beside|of those that|go(?:es)? on|in vain|counts? for nothing|anew)\b")
# A few steps of a run show that its command works.
FEW_STEPS = ["--max_steps", "2", "--save_strategy", "no", "--load_best_model_at_end", "false", "--eval_strategy", "no"]
SAVED_STEPS = ["--max_steps", "2", "--logging_steps", "1"]
SHORT_ANSWERS = ["--num_sample_generations", "1", "--max_new_tokens", "4"]


class Block(NamedTuple):
    """A fenced block: where it stands, its mark, its language and its content."""

    document: str
    mark: str
    language: str
    content: str


def blocks(document: Path) -> list[Block]:
    """All fenced blocks of a document, in order."""
    found = BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [Block(document.name, each["mark"] or "", each["language"], each["content"]) for each in found]


def commands(text: str) -> list[list[str]]:
    """The words of every command in a block of bash."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.split("#")[0].strip()]


def recipe_commands() -> list[list[str]]:
    """The commands in the headers of the recipes."""
    found = []
    for recipe in RECIPES_OF_KNOWN_FLAGS:
        header = [line[1:] for line in recipe.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
        lines = "\n".join(header).replace("\\\n", " ").splitlines()
        found += [shlex.split(line) for line in lines if "scripts/" in line and "..." not in line]
    return found


def unique(each: list[list[str]]) -> list[list[str]]:
    """Commands in order, without duplicates."""
    return [list(words) for words in dict.fromkeys(map(tuple, each))]


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]
BASH = [block for block in BLOCKS if block.language == "bash"]
ALL_COMMANDS = unique([words for block in BASH for words in commands(block.content)] + recipe_commands())
TO_RUN = unique([words for block in BASH if block.mark == "run" for words in commands(block.content)])
SMALL = next(words for words in TO_RUN if words[-2:] == ["--output_dir", "outputs/small"])
PYTHON = [block for block in BLOCKS if block.language == "python"]
PROGRAMS = [block for block in PYTHON if block.mark == "run"]


def test_every_block_of_commands_says_who_runs_it() -> None:
    assert len(BASH) > 20
    assert [block for block in BASH if block.mark not in MARKS] == []
    assert [block for block in PYTHON if block.mark not in ("run", "nodes")] == []
    assert len(recipe_commands()) == len(RECIPES_OF_KNOWN_FLAGS)


def test_every_command_is_understood() -> None:
    for words in ALL_COMMANDS:
        assert_understood(words)


def assert_understood(words: list[str]) -> None:
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    if words[:2] == ["python", "-m"]:
        assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
    for flag in ("--config_file", "--deepspeed"):
        if flag in words:
            assert (ROOT / words[words.index(flag) + 1]).is_file()
    if "--deepspeed" in words:
        read_deepspeed(str(ROOT / words[words.index("--deepspeed") + 1]))
    if "indictune" in words[:-1] and words[0] in ("indictune", "accelerate", "torchrun", "deepspeed"):
        verb, *flags = words[words.index("indictune") + 1 :]
        assert_verb_takes(verb, flags)
    script = next((index for index, word in enumerate(words) if word in TRAINING), None)
    if script is not None:
        assert read_recipe(of_repository(words[script + 1 :]), TRAINING[words[script]]).problems == []


def assert_verb_takes(verb: str, flags: list[str]) -> None:
    """A verb takes its flags, and those of a run where it has one."""
    if verb == "train":
        with chdir(ROOT):
            found = problems_of(read_asked, flags)
        assert {each.code for each in found} <= {"no-such-file"}  # which the reader has
    elif verb != "recipes":
        own = (COMMANDS[verb],) if verb in COMMANDS else ()
        of_runs = TRAINING.values() if verb in ("prepare", "inspect", "plan", "doctor", "sweep", "distil") else [()]
        given = of_repository(without_bare_word(flags))
        bare = {"push": "--repo_id", "report": "--runs"}  # several bare words
        given = [bare[verb], *given] if verb in bare and given else given
        assert [] in [read_recipe(given, (*own, *types)).problems for types in of_runs]


def of_repository(flags: list[str]) -> list[str]:
    """Flags with the recipe's whole path."""
    return [str(ROOT / flag) if flag.startswith("recipes/") else flag for flag in flags]


def without_bare_word(flags: list[str]) -> list[str]:
    """`merge` and `checkpoint` take their folder as a bare first word."""
    return flags if flags[0].startswith("--") else flags[1:]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reader with a few rows of their own; commands run in the order of the pages."""
    folder = tmp_path_factory.mktemp("reader")
    for split, number in (("train", 48), ("validation", 12), ("test", 12)):
        lines = (ROOT / f"indictune/data/samples/{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines[:number]]
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((row["text"], row["label"]) for row in rows)])
    for split in ("train", "validation"):
        sentences = "\n\n".join(
            block.content for block in BLOCKS if "B-PER" in block.content and "{" not in block.content
        )
        (folder / f"{split}.conll").write_text(f"{sentences}\n" * 8, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def small(reader: Path) -> Path:
    """The finished run that most commands and programs read: `outputs/small`."""
    run(SMALL, reader)
    return reader


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=pytest.mark.slow if "recipes/sentiment/demo.yaml" in words else pytest.mark.more)
        for words in TO_RUN
        if words != SMALL
    ],
    ids=" ".join,
)
def test_a_command_runs(words: list[str], small: Path) -> None:
    run(words, small)


def run(words: list[str], folder: Path) -> None:
    """Run a command as if typed in `folder`, cut to a few steps."""
    result = start(list(as_typed(words, folder)))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def as_typed(words: list[str], folder: Path) -> Iterator[str]:
    """The command for `start`: our programs, the reader's files, few steps, a free port."""
    for word in words:
        if word in ("accelerate", "torchrun", "deepspeed"):
            yield str(Path(python()[0]).parent / word)
        elif word == "python":
            yield from python()
        elif word == "indictune":
            yield from python() if words[0] == "indictune" else ()
            yield "indictune/__main__.py"
        elif word == "launch":
            yield from ("launch", "--main_process_port", str(free_port()))
        elif word.startswith("outputs/") or word.endswith((".csv", ".conll")):
            yield str(folder / word)
        elif word != "-m":
            yield word
    scripts = [word for word in words if word in TRAINING]
    trains = bool(scripts) or words[:2] == ["indictune", "train"]
    if trains and "--output_dir" not in words:
        (recipe,) = (ROOT / word for word in words if word.startswith("recipes/"))
        (output,) = re.findall(r"^output_dir: (\S+)", recipe.read_text(encoding="utf-8"), flags=re.MULTILINE)
        yield from ("--output_dir", str(folder / output))
    if trains:
        yield from SAVED_STEPS if {"outputs/small", "outputs/again"} & set(words) else FEW_STEPS
    if scripts == ["scripts/train_llama.py"]:
        yield from SHORT_ANSWERS


@pytest.mark.more
@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: f"{block.document}: {block.content.splitlines()[-1]}")
def test_a_program_runs(block: Block, small: Path) -> None:
    with chdir(small):
        exec(compile(block.content, block.document, "exec"), {})


def test_the_demo_of_the_readme_is_that_of_make() -> None:
    lines = [
        line
        for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
        if "recipes/sentiment/demo" in line
    ]
    assert len(lines) == 2
    for line in lines:
        assert line.partition("$(BIN)/")[2].partition(";")[0].split() in ALL_COMMANDS


def test_every_path_that_a_document_names_exists() -> None:
    missing = set()
    for document in (*DOCUMENTS, *RECIPES):
        text = document.read_text(encoding="utf-8")
        paths = {ROOT / name for name in re.findall(rf"(?<![\w/.-]){IN_REPOSITORY}", text)}
        paths |= {document.parent / name for name in re.findall(r"\]\(([\w./-]+)[)#]", text)}
        missing |= {(document.name, str(each)) for each in paths if not each.exists()}
    assert missing == set()


def test_every_test_that_a_document_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/tests.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [each for each in named if f"def {each[1]}(" not in (ROOT / each[0]).read_text(encoding="utf-8")] == []


def test_every_strategy_file_is_in_the_tables() -> None:
    names = [
        f"{folder}/{file.name}"
        for folder in ("accelerate_configs", "ds_configs")
        for file in (ROOT / folder).iterdir()
    ]
    strategies = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    assert [name for name in names if name not in strategies] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in names if name.startswith("accelerate") and name not in readme] == []


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints() -> None:
    """To the letter, but for the last digits of scores, which differ between kinds of CPU."""
    if main(["recipes", "--weights"]) != 0:
        pytest.skip("the packages with the weights cannot be fetched")
    (shown,) = demo_output.BLOCK.findall(demo_output.README.read_text(encoding="utf-8"))
    number = re.compile(r"\d\.\d{4}")
    seconds = re.compile(r"\(\d+\.\d s\)")
    shown, printed = (seconds.sub("", each) for each in (shown, demo_output.printed()))
    assert number.sub("#", shown) == number.sub("#", printed)
    scores = [float(each) for each in number.findall(printed)]
    assert [float(each) for each in number.findall(shown)] == pytest.approx(scores, abs=0.1)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("|", " ")
    text = re.sub("```text\n.*?```", "", text, flags=re.DOTALL)  # what a command prints
    assert len(text.split()) <= WORDS_OF_README


@pytest.mark.parametrize("document", [strategy_files.README, strategy_files.PAGE], ids=lambda document: document.name)
def test_a_table_of_strategy_files_is_fresh(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert text == strategy_files.with_table(document), f"{document} is stale: type `python -m docs.generate`"
    assert re.findall(r"^\| `accelerate_configs/(\w+)\.yaml` \|", text, flags=re.MULTILINE) == list(
        strategy_files.files()
    )
    assert set(strategy_files.files()) == set(strategies())


@pytest.mark.more
@pytest.mark.parametrize("name", plan_tables.CONFIGS)
def test_a_plan_on_the_page_of_strategies_is_fresh(name: str) -> None:
    (found,) = (
        each for each in plan_tables.SECTION.finditer(plan_tables.PAGE.read_text("utf-8")) if each["name"] == name
    )
    assert found[0] == found[1] + plan_tables.answer(name, found["words"]), "stale: type `python -m docs.generate`"


def test_the_sizes_of_installs_are_those_of_the_last_measurement() -> None:
    page = install_sizes.PAGE.read_text(encoding="utf-8")
    assert page == install_sizes.page_with_sizes(), "stale: type `python -m docs.generate`"


def test_the_flags_of_help_are_fresh() -> None:
    assert FLAGS_FILE.read_text(encoding="utf-8") == flags_file()


def test_the_design_names_every_file() -> None:
    design = house_map.DESIGN.read_text(encoding="utf-8")
    assert design == house_map.with_files(), "stale: type `python -m docs.generate`"


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert written == PAGES[name](), f"docs/{name} is stale: type `python -m docs.generate`"


def test_each_flag_can_be_linked_to() -> None:
    page = (ROOT / "docs/flags.md").read_text(encoding="utf-8")
    anchors = re.findall(r'<a id="([\w-]+)"></a>\[`--\w+`\]\(#([\w-]+)\)', page)
    names = {each for each, _ in anchors}
    assert {"global_batch_size", "indictune-predict-excel", "scripts-train-llama-py-packing"} <= names
    assert [each for each, link in anchors if each != link] == []
    assert len(anchors) == len(names) == page.count("| <a id=") > 200


def test_the_site_has_a_dark_mode_and_tables_that_scroll() -> None:
    site, _, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("validation:")
    schemes = yaml.safe_load(site)["theme"]["palette"]
    assert [(each["scheme"], "toggle" in each) for each in schemes] == [("default", True), ("slate", True)]
    style = (ROOT / "docs/stylesheets/extra.css").read_text(encoding="utf-8")
    assert re.search(r"\.md-typeset__scrollwrap \{\s+overflow-x: auto;", style)


def test_every_page_is_in_the_navigation() -> None:
    assert sorted(NAVIGATION) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_readme_and_index_list_the_pages_as_the_navigation_does() -> None:
    site = (ROOT / "mkdocs.yml").read_text("utf-8").partition("nav:\n")[2]
    nav = re.findall(r"^ +- (.+?):(?: (\w+\.md))?$", site, flags=re.MULTILINE)
    assert [title for title, page in nav if not page] == SECTIONS
    (home, *others) = nav
    assert home == ("Home", "index.md")
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Documentation\n")[2]
    index = (ROOT / "docs/index.md").read_text("utf-8").partition("## Where to go\n")[2]
    in_readme = re.findall(r"^- \*\*(.+?)\*\*|\[(.+?)\]\(docs/(\w+\.md)\)", readme, flags=re.MULTILINE)
    in_index = re.findall(r"^### (.+)$|^- \[(.+?)\]\((\w+\.md)\): ", index, flags=re.MULTILINE)
    for document in (in_readme, in_index):
        assert [(section or title, page) for section, title, page in document] == others
    for title, page in others:
        assert not page or (ROOT / "docs" / page).read_text("utf-8").startswith(f"# {title}\n"), page


def sentences(document: Path) -> Iterator[str]:
    """The sentences of a document, without code, links and markup; a cell of a table is a text of its own."""
    text = re.sub(
        r"```.*?```|<!--.*?-->|`[^`]*`|\]\([^)]*\)|[*#>!]",
        " X ",
        document.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    for paragraph in re.split(r"\n\s*\n|\n\s*- |\n\s*\d\. |\||\n#", text):
        yield from re.split(r"(?<=[.:;?!])\s", " ".join(paragraph.replace(" X ", " ").split()))


def test_sentences_are_short_and_plain() -> None:
    found = [(document.name, each) for document in DOCUMENTS for each in sentences(document)]
    assert [each for each in found if len(re.findall(r"\S*\w\S*", each[1])) > WORDS_OF_SENTENCE] == []
    assert [each for each in found if ODD_WORDS.search(each[1])] == []


def test_the_scoreboard_counts_the_tests_of_its_result_files() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    faults: dict[str, Any] = {}
    for rows in ("11, 12, 14, 15, 16", "18, 19"):
        (result,) = re.findall(rf"\| {rows} \| `(.*?)` \|", page)
        faults |= json.loads((ROOT / result).read_text(encoding="utf-8"))["faults"]
    counted = re.findall(r"\| (\d+) \| [^|]* \| (\d+) of (\d+) tests", page)
    assert {row for row, _, _ in counted} == set(faults)
    for row, passed, total in counted:
        assert int(passed) == int(total) == sum(each.get("passed", 0) for each in faults[row]["ours"].values())


def test_the_page_of_tasks_explains_every_method_of_a_task() -> None:
    page = (ROOT / "docs/adding_a_task.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `(\w+)` \| [^|]*\? \|", page, flags=re.MULTILINE)
    assert set(explained) == {"arguments", *Task.__abstractmethods__}


def test_the_way_of_a_run_names_the_functions_of_the_script() -> None:
    page = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    steps = re.findall(r"^   │  (\w+) ", page, flags=re.MULTILINE)
    script = (ROOT / "indictune/training/run_task.py").read_text(encoding="utf-8").partition("def run_task")[2]
    places = [script.find(f"{step}(") for step in steps]
    assert len(steps) == 10
    assert -1 not in places
