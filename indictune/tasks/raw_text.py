"""Raw text (continued pretraining): what masked and causal language models share, and a model that guesses words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn import functional
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoModelForMaskedLM, PreTrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from indictune.config.arguments import IndicTrainingArguments as Args
from indictune.config.arguments import MaskedTextArguments, ModelArguments, RawTextArguments
from indictune.config.plan import RunPlan
from indictune.data import documents
from indictune.data.bad_rows import keep_rejected
from indictune.data.cache import StoredRows, counts_of
from indictune.data.collation import IGNORED_LABEL, JoinRows, PadToLongest
from indictune.data.health.findings import warning_notes
from indictune.data.health.row_health import check_unknown, language_table, measure, measured_once
from indictune.data.load_rows import load_documents
from indictune.data.packing import TextsOfRows, TokenRows
from indictune.data.read.row_sources import file_source, sources_by_split
from indictune.data.row_choice import Splits, mixture_of, split_of
from indictune.errors import Problem, Problems, problem, problems_of
from indictune.evaluation.breakdown import Breakdown, block_of, break_down
from indictune.evaluation.scorers import guessed_texts
from indictune.models.load import Model, load_config, load_tokenizer
from indictune.models.task_models import check_shapes, load_masked
from indictune.models.unpadded import ATTENTIONS, MASKED, choose_masked, uncounted_token, why_not_joined
from indictune.tasks.loss import ExactLoss
from indictune.tasks.protocol import (
    Batch,
    Collator,
    EvaluationPlan,
    Inputs,
    Objective,
    Origins,
    Results,
    Scripts,
    Task,
    TestTokens,
    Tokens,
    row_facts,
)

if TYPE_CHECKING:
    from datasets import Dataset

SCORES = ("loss", "perplexity", "bits_per_character")
Data = TypeVar("Data", bound=RawTextArguments)
Training = TypeVar("Training", bound=Args)


@dataclass(frozen=True)
class TextRows:
    """The documents of a run, the tokenizer, and what cuts them."""

    splits: Splits[StoredRows]
    tokenizer: Tokenizer
    cutter: documents.Cutter


class RawText(Task[TextRows, Data, Training]):
    """A language model learns raw text."""

    cleans = False  # whether texts are read as a classifier reads them
    kept_apart: tuple[Collection[str], Collection[str | None]]  # models and attention that keep documents apart
    scores = (*SCORES, "worst_language_loss")
    lower_is_better = SCORES

    def check(self, plan: RunPlan[Data, Training]) -> list[Problem]:
        reason = why_not_joined(plan.model, plan.known_config, *self.kept_apart)
        model = "--model_name_or_path", plan.model.model_name_or_path
        return [] if reason is None else [problem("not-of-raw-text", *model, reason=reason)]

    def pads(self, plan: RunPlan[Data, Training]) -> bool:
        return False

    def group_scores(self, plan: RunPlan[Data, Training]) -> tuple[str, ...]:
        return SCORES

    def open(self, plan: RunPlan[Data, Training], problems: Problems) -> Inputs:
        tokenizer = problems.attempt(load_tokenizer, plan.model)
        read = documents.document_reader(plan.data)
        sources = problems.attempt(sources_by_split, plan.data, problems, documents.BUILTIN_TEXTS, read)
        return Inputs(tokenizer, sources)

    def read(self, plan: RunPlan[Data, Training], inputs: Inputs, problems: Problems) -> TextRows | None:
        rows = self._read(plan.data, inputs, problems, split_of(plan), mixture_of(plan))
        if rows is not None:
            problems.attempt(check_unknown, rows.splits.rows["train"], rows.tokenizer, plan)
        return rows

    def _read(self, data: Any, inputs: Inputs, problems: Problems, *more: Any) -> TextRows | None:
        probability, cutter, splits = data.mlm_probability if self.name == "mlm" else None, None, None
        if inputs.tokenizer is not None:
            cutter = problems.attempt(documents.Cutter.of, inputs.tokenizer, data.max_length, probability)
        if inputs.sources is not None:
            splits = problems.attempt(load_documents, inputs.sources, data, problems, self.cleans, *more)
        return None if splits is None or cutter is None else TextRows(splits, cutter.tokenizer, cutter)

    def tokenise(self, plan: RunPlan[Data, Training], rows: TextRows) -> Tokens:
        made, train = documents.tokenise_documents(rows.splits, rows.cutter), rows.splits.rows["train"]
        facts = {"rows": len(train), "languages": dict(sorted(counts_of(train.table["language"]).items()))}
        return replace(tokens_of(made, rows.splits, rows.tokenizer, []), scores=SCORES, facts=facts)

    def tokenise_test(self, plan: EvaluationPlan, tokenizer: Tokenizer | None, problems: Problems) -> TestTokens:
        asked, sources = plan.data, {}
        with problems.collecting():
            sources["test"] = file_source(asked.test_file, "--test_file", documents.document_reader(asked))
        rows = self._read(asked, Inputs(tokenizer, sources or None), problems)
        problems.raise_any()
        assert rows is not None
        made = documents.tokenise_documents(rows.splits, rows.cutter)
        keep_rejected(made.folder, plan.output_dir, plan.launch.rank)
        return TestTokens(made.datasets["test"], [*rows.splits.notes, *made.notes], origins_of(made, "test"))


def origins_of(
    made: TokenRows, split: str, columns: Sequence[str] = ("text",), text_of: Callable[..., str] = str
) -> Origins:
    """Where the rows of a split that is not packed come from; their texts are made of the cells of columns."""
    return Origins(partial(made.location_in, split), TextsOfRows(made, split, columns, text_of))


def tokens_of(made: TokenRows, splits: Splits[Any], tokenizer: Tokenizer, notes: Sequence[str], *texts: Any) -> Tokens:
    """The tokens of a language model's rows, which are measured. `texts` is as of `origins_of`; `notes` come first."""
    measured = made.rows, tokenizer, made.truncated, splits.findings
    health = measured_once([made.folder.name], lambda: measure(*measured))
    notes = [*notes, *splits.notes, *made.notes, *warning_notes(health.findings)]
    summary = "\n".join(filter(None, (language_table(health.languages), made.summary)))
    origins = {split: origins_of(made, split, *texts) for split in made.datasets if split != "train"}
    datasets = made.datasets["train"], made.datasets.get("validation"), made.datasets.get("test")
    of_run = *datasets, made.location, made.folder, list(dict.fromkeys(notes)), summary
    return Tokens(*of_run, origins=origins, health=health)


class GuessedTokens(Objective):
    """How raw text is scored. `measure` gives the summed loss of each row in nats, and the tokens that count."""

    METRICS: tuple[str, ...] = SCORES

    def predictions(self, dataset: Dataset, results: Results) -> Iterator[dict[str, Any]]:
        columns = results[0].tolist(), results[1].tolist(), dataset["characters"][:]
        for loss, tokens, characters in zip(*columns, strict=True):
            yield {"loss": loss / max(tokens, 1), "num_tokens": tokens, "num_characters": characters}

    def breakdown(self, dataset: Dataset, results: Results, scripts: Scripts = None, draws: int = 0) -> Breakdown:
        scorer = guessed_texts(results[0], results[1], dataset.data["characters"].to_numpy())
        return break_down("texts", row_facts(dataset, scripts), scorer, lower_is_better=True, draws=draws)

    def metrics(self, found: Breakdown) -> dict[str, Any]:
        return block_of(found, lambda group: group.counts | {name: group.scores[name].value for name in SCORES})


Plan = RunPlan[MaskedTextArguments, Args]


class MaskedText(RawText[MaskedTextArguments, Args]):
    """A model guesses words that are masked. Texts are cleaned, as those of the classifier that follows are."""

    arguments = (ModelArguments, MaskedTextArguments, Args)
    name = "mlm"
    head = "ForMaskedLM"
    cleans = True
    kept_apart = MASKED, ATTENTIONS

    def read_config(self, args: ModelArguments) -> PreTrainedConfig:
        return load_config(args, MaskedTokens.kind, MODEL_FOR_MASKED_LM_MAPPING, "masked language model")

    def check(self, plan: Plan) -> list[Problem]:
        refused, axes = list[tuple[str, object, str]](), plan.launch.axes
        if plan.model.method != "full":
            refused.append(("--method", plan.model.method, "a classifier that follows takes whole weights"))
        if (size := plan.model.vocabulary_from_train) is not None:
            refused.append(("--vocabulary_from_train", size, "the model's own vocabulary is trained"))
        if axes.pipeline * axes.tensor > 1:
            refused.append(("strategy", plan.launch.strategy, "the head and the embedding are one weight"))
        found = [problem("not-of-raw-text", flag, value, reason=reason) for flag, value, reason in refused]
        shapes = problems_of(check_shapes, MaskedTokens.kind, plan.model, plan.model_config, [])
        return super().check(plan) + found + shapes

    def load_model(self, plan: Plan, args: Args, rows: TextRows, reads_weights: bool) -> Model:
        return load_masked(plan.model, self.read_config(plan.model), rows.tokenizer)

    def objective(
        self, args: Args, config: PreTrainedConfig, tokenizer: Tokenizer, padded: bool, rows: TextRows | None
    ) -> Objective:
        seed = args.seed if args.data_seed is None else args.data_seed
        return MaskedTokens(config, tokenizer, None if rows is None else rows.cutter.masking, seed)


class MaskedTokens(GuessedTokens):
    """The tokens of masked words; only their logits are computed. `masking` and `seed` are of a training."""

    kind = AutoModelForMaskedLM
    loss = ExactLoss()

    def __init__(
        self, config: PreTrainedConfig, tokenizer: Tokenizer, masking: documents.Masking | None, seed: int
    ) -> None:
        self.config, self.masking, self.seed = config, masking, seed
        tokenizer.padding_side = "right"  # positions are counted from the first token
        self._padding = tokenizer.pad_token_id, tokenizer.padding_side

    def prepare(self, model: nn.Module, padded: bool) -> None:
        choose_masked(model, joins=not padded)

    def collator(self, evaluating: bool) -> Collator:
        if evaluating:
            return PadToLongest(*self._padding, with_row_numbers=True)
        assert self.masking is not None
        return documents.MaskWords(JoinRows(uncounted_token(self.config)), self.masking, self.seed)

    def measure(self, model: nn.Module, inputs: Batch) -> tuple[torch.Tensor, ...]:
        labels = inputs.pop("labels")
        places = documents.counted_places(labels)
        logits = model(**inputs, **{documents.PLACES: places}).logits[0]
        losses = functional.cross_entropy(logits.float(), labels.flatten()[places], reduction="none")
        of_rows = torch.zeros(len(labels), device=losses.device).index_add(0, places // labels.shape[1], losses)
        return of_rows, (labels != IGNORED_LABEL).sum(-1)
