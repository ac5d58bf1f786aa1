"""A saved model is read again: what is whole passes, and every fault is found by its name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers.utils.import_utils import enable_tf32

from indictune.models.active_vocabulary import ActiveEmbedding
from indictune.training.chat_trainer import LlamaTrainer
from indictune.training.verify import SavedModelError, verify_saved
from tests.data.packs import pack
from tests.training.tiny import answer_rows, tiny_llama, tiny_trainer

ROWS = answer_rows(9, 5, 12)
Weights = dict[str, torch.Tensor]
Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_llama(tmp_path_factory.mktemp("base"))


Trained = Callable[[str], LlamaTrainer]


def train(base: str, folder: Path, method: str) -> LlamaTrainer:
    """The trainer of a run of two steps, which was saved to a folder and is whole until a test breaks it."""
    trainer = tiny_trainer(base, folder, ROWS, method=method, max_steps=2, learning_rate=0.5)
    trainer.train()
    trainer.save_model()
    verify_saved(trainer, folder)
    return trainer


@pytest.fixture(scope="module")
def runs(base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LlamaTrainer, Path]]:
    """A function: the trainer and the folder of one run of each method. No test changes them."""

    @cache
    def run(method: str) -> tuple[LlamaTrainer, Path]:
        folder = tmp_path_factory.mktemp(method)
        return train(base, folder, method), folder

    return run


@pytest.fixture
def trained(runs: Callable[[str], tuple[LlamaTrainer, Path]], tmp_path: Path) -> Trained:
    """A function: the trainer of a method's run, whose saved files are copied to the test's `out`."""

    def copied(method: str) -> LlamaTrainer:
        trainer, folder = runs(method)
        shutil.copytree(folder, tmp_path / "out")
        return trainer

    return copied


def change(folder: Path, name: str, edit: Callable[[Weights], object]) -> None:
    weights = load_file(folder / name)
    edit(weights)
    save_file({key: each.contiguous() for key, each in weights.items()}, folder / name, metadata={"format": "pt"})


def problem_of(trainer: LlamaTrainer, folder: Path) -> str:
    with pytest.raises(SavedModelError) as caught:
        verify_saved(trainer, folder)
    start = f"{folder}: the saved model is not the trained one; its checkpoints are untouched. "
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_what_was_saved_whole_passes(trained: Trained, method: str) -> None:
    trained(method)


@pytest.mark.more
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_on_a_base_in_a_bin_is_read(tmp_path: Path, method: str) -> None:
    base = Path(tiny_llama(tmp_path / "base"))
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    trainer = tiny_trainer(str(base), tmp_path / "out", ROWS, method=method, max_steps=2, learning_rate=0.5)
    trainer.train()
    trainer.save_model()
    verify_saved(trainer, tmp_path / "out")
    change(tmp_path / "out", "adapter_model.safetensors", lambda weights: weights.popitem())
    assert problem_of(trainer, tmp_path / "out")


@pytest.mark.parametrize(
    "rows",
    [pack(ROWS, 16), *(pytest.param(answer_rows(*each), marks=pytest.mark.more) for each in ((7,), (100, 90, 80)))],
)
def test_rows_of_any_number_and_length_are_probed(base: str, tmp_path: Path, rows: Dataset) -> None:
    trainer = tiny_trainer(base, tmp_path / "out", rows)
    trainer.train()
    trainer.save_model()
    verify_saved(trainer, tmp_path / "out")


class TestFullModels:
    NAME = "model.safetensors"

    def test_an_empty_tensor(self, trained: Trained, tmp_path: Path) -> None:
        trainer = trained("full")
        change(tmp_path / "out", self.NAME, lambda weights: weights.update({f"{Q_PROJ}.weight": torch.empty(0, 16)}))
        assert "[weights-do-not-fit]" in problem_of(trainer, tmp_path / "out")

    def test_one_ranks_half_of_a_tensor(self, trained: Trained, tmp_path: Path) -> None:
        trainer = trained("full")
        change(tmp_path / "out", self.NAME, lambda weights: weights.update({f"{Q_PROJ}.weight": torch.ones(8, 16)}))
        message = str(problem_of(trainer, tmp_path / "out"))
        assert f"--model {tmp_path / 'out'}: " in message
        assert f"{Q_PROJ}.weight" in message
        assert "[weights-do-not-fit]" in message

    def test_a_file_that_was_cut_short(self, trained: Trained, tmp_path: Path) -> None:
        trainer = trained("full")
        path = tmp_path / "out" / self.NAME
        path.write_bytes(path.read_bytes()[:-100])
        assert problem_of(trainer, tmp_path / "out").startswith("It cannot be read: ")

    def test_a_weight_changed_by_noise(self, trained: Trained, tmp_path: Path) -> None:
        trainer = trained("full")
        noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 10
        change(tmp_path / "out", self.NAME, lambda weights: weights[f"{Q_PROJ}.weight"].add_(noise))
        message = problem_of(trainer, tmp_path / "out")
        assert message.startswith(f"{Q_PROJ}.weight has the norm ")

    def test_a_weight_that_is_nan_where_no_logit_shows_it(self, base: str, tmp_path: Path) -> None:
        trainer = train(base, tmp_path / "out", "full")
        model: Any = trainer.model
        name = "model.embed_tokens.weight"
        unused = next(row for row in range(64) if all(row not in tokens for tokens in ROWS["input_ids"]))
        with torch.no_grad():
            model.get_input_embeddings().weight[unused] = float("nan")
        trainer.save_model()
        assert problem_of(trainer, tmp_path / "out").startswith(f"{name} has the norm nan instead of nan.")

    def test_a_weight_whose_rows_are_in_another_order(self, trained: Trained, tmp_path: Path) -> None:
        trainer = trained("full")
        name = f"{Q_PROJ}.weight"
        change(tmp_path / "out", self.NAME, lambda weights: weights.update({name: weights[name].flip(0).contiguous()}))
        message = problem_of(trainer, tmp_path / "out")
        assert message.startswith("Its logits differ by 0.")
        assert message.endswith(" of their norm, where 0.001 is allowed.")

    @pytest.mark.parametrize("by", ["transformers", "accelerate"])
    @pytest.mark.usefixtures("tf32_as_before")
    def test_logits_may_lie_further_apart_where_products_are_in_tf32(
        self, trained: Trained, tmp_path: Path, by: str
    ) -> None:
        trainer = trained("full")
        noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)) / 200
        change(tmp_path / "out", self.NAME, lambda weights: weights[f"{Q_PROJ}.weight"].add_(noise))
        assert (
            problem_of(trainer, tmp_path / "out")
            == "Its logits differ by 0.0024 of their norm, where 0.001 is allowed."
        )
        if by == "transformers":
            enable_tf32(True)
        else:
            torch.backends.cuda.matmul.allow_tf32 = True
        verify_saved(trainer, tmp_path / "out")
        change(tmp_path / "out", self.NAME, lambda weights: weights[f"{Q_PROJ}.weight"].mul_(1.06))
        assert f"{Q_PROJ}.weight has the norm" in problem_of(trainer, tmp_path / "out")

    def test_the_model_that_training_began_with(self, base: str, tmp_path: Path) -> None:
        trainer = tiny_trainer(base, tmp_path / "out", ROWS, learning_rate=0.5)
        trainer.save_model()
        trainer.train()
        assert "has the norm" in problem_of(trainer, tmp_path / "out")


class TestModelsOfWhichSomeRowsAreTrained:
    NAME = "model.safetensors"
    EMBEDDING = "model.embed_tokens.weight"

    @pytest.fixture(scope="class")
    @classmethod
    def run(cls, base: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaTrainer, Path]:
        """A trainer whose model was trained and saved, and the folder. No test changes them."""
        folder = tmp_path_factory.mktemp("rows")
        trainer = tiny_trainer(base, folder, ROWS, max_steps=2, learning_rate=0.5)
        model: Any = trainer.model
        row_ids = torch.tensor(sorted({2, *(token for row in ROWS["input_ids"] for token in row)}))  # 2 pads
        assert 5 < len(row_ids) < 40
        model.set_input_embeddings(ActiveEmbedding(model.get_input_embeddings().weight, row_ids, None, True))
        trainer.train()
        trainer.save_model()
        verify_saved(trainer, folder)  # whole until a test breaks a copy
        return trainer, folder

    @pytest.fixture
    def saved(self, run: tuple[LlamaTrainer, Path], tmp_path: Path) -> LlamaTrainer:
        """The trainer, whose saved files are copied to the test's `out`."""
        shutil.copytree(run[1], tmp_path / "out")
        return run[0]

    def change_row(self, trainer: LlamaTrainer, folder: Path, is_used: bool, edit: Callable[..., object]) -> None:
        row_ids = cast(Any, trainer.model).get_input_embeddings().row_ids.tolist()
        rows = [row for row in range(64) if (row in row_ids) == is_used]
        change(folder, self.NAME, lambda weights: edit(weights[self.EMBEDDING], rows))

    def test_an_unused_row_that_is_not_as_it_began(self, saved: LlamaTrainer, tmp_path: Path) -> None:
        self.change_row(saved, tmp_path / "out", False, lambda weight, rows: weight[rows[0], 3:4].add_(1e-2))
        assert problem_of(saved, tmp_path / "out") == f"{self.EMBEDDING}: rows that no text uses have changed."

    def test_a_trained_row_that_is_not_the_trained_one(self, saved: LlamaTrainer, tmp_path: Path) -> None:
        self.change_row(saved, tmp_path / "out", True, lambda weight, rows: weight[rows[2]].mul_(3))
        assert problem_of(saved, tmp_path / "out").startswith(f"{self.EMBEDDING} has the norm ")

    def test_trained_rows_in_another_order(self, saved: LlamaTrainer, tmp_path: Path) -> None:
        def flip(weight: torch.Tensor, rows: list[int]) -> None:
            weight[rows] = weight[rows].flip(0)

        self.change_row(saved, tmp_path / "out", True, flip)
        assert problem_of(saved, tmp_path / "out").endswith(" of their norm, where 0.001 is allowed.")

    def test_the_trained_rows_alone(self, saved: LlamaTrainer, tmp_path: Path) -> None:
        change(tmp_path / "out", self.NAME, lambda each: each.update({self.EMBEDDING: each[self.EMBEDDING][:20]}))
        assert problem_of(saved, tmp_path / "out").startswith(
            f"It cannot be read: --model {tmp_path / 'out'}: its weights "
        )


@pytest.mark.parametrize("method", ["lora", "qlora"])
class TestAdapters:
    NAME = "adapter_model.safetensors"
    A, B = (f"base_model.model.{Q_PROJ}.lora_{matrix}.weight" for matrix in "AB")

    def test_an_empty_tensor(self, trained: Trained, tmp_path: Path, method: str) -> None:
        trainer = trained(method)
        change(tmp_path / "out", self.NAME, lambda weights: weights.update({self.B: torch.empty(0, 16)}))
        assert "size mismatch" in problem_of(trainer, tmp_path / "out")

    def test_a_tensor_that_is_missing(self, trained: Trained, tmp_path: Path, method: str) -> None:
        trainer = trained(method)
        change(tmp_path / "out", self.NAME, lambda weights: weights.pop(self.A))
        assert "[adapter-does-not-fit]" in problem_of(trainer, tmp_path / "out")

    def test_one_ranks_half_of_a_tensor(self, trained: Trained, tmp_path: Path, method: str) -> None:
        trainer = trained(method)
        change(tmp_path / "out", self.NAME, lambda weights: weights.update({self.B: weights[self.B][:8]}))
        message = problem_of(trainer, tmp_path / "out")
        assert message.startswith("It cannot be read: ")
        assert f"size mismatch for {self.B.replace('.weight', '.default.weight')}" in message

    def test_matrices_that_have_learned_nothing(self, trained: Trained, tmp_path: Path, method: str) -> None:
        trainer = trained(method)
        change(
            tmp_path / "out",
            self.NAME,
            lambda weights: [each.zero_() for name, each in weights.items() if "lora_B" in name],
        )
        assert "has the norm 0 instead of" in problem_of(trainer, tmp_path / "out")

    def test_a_weight_changed_by_noise(self, trained: Trained, tmp_path: Path, method: str) -> None:
        trainer = trained(method)
        noise = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        change(tmp_path / "out", self.NAME, lambda weights: weights[self.B].add_(noise))
        name = self.B.replace(".weight", ".default.weight")
        assert problem_of(trainer, tmp_path / "out").startswith(f"{name} has the norm ")

    @pytest.mark.more
    def test_a_matrix_whose_rows_are_in_another_order(self, base: str, tmp_path: Path, method: str) -> None:
        trainer = train(base, tmp_path / "out", method)
        assert trainer.model is not None
        with torch.no_grad():
            for matrix in (each for name, each in trainer.model.named_parameters() if "lora_B" in name):
                matrix.mul_(50)  # so that it weighs
        trainer.save_model()
        change(tmp_path / "out", self.NAME, lambda each: each.update({self.B: each[self.B].flip(0).contiguous()}))
        allowed = {"lora": 0.001, "qlora": 0.05}[method]
        assert problem_of(trainer, tmp_path / "out").endswith(f" of their norm, where {allowed:g} is allowed.")
