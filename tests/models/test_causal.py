"""Causal language models as a run starts with them, and as a finished run is read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, GenerationConfig, PreTrainedConfig

from indictune.config.arguments import Method, ModelArguments
from indictune.models.adapters import nf4_config, save_adapter_extras
from indictune.models.load import check_max_length, load_tokenizer, load_trained
from indictune.models.task_models import PACKED_MODELS, check_causal, check_packing, load_causal, load_causal_config
from tests.models.tiny import CONFIGS, SMALL, words_tokenizer
from tests.refusals import refused

IDS = torch.tensor([[3, 4, 9, 10, 5], [7, 8, 9, 10, 6]])
SMALL_IMAGE = {"image_size": 28, "patch_size": 14}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    """The folder of a tiny LLaMA with random weights in bf16, as LLaMA's own are."""
    return written(tmp_path / "llama", CONFIGS["llama"]())


def written(folder: Path, config: PreTrainedConfig, **settings: Any) -> str:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    words_tokenizer(None).save_pretrained(folder)
    if settings:
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **settings).save_pretrained(folder)
    return str(folder)


def load(args: ModelArguments, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return load_causal(args, load_tokenizer(args), dtype, ends=[2])


def train(model: nn.Module) -> None:
    """A few steps, so that the matrices B are no longer zero."""
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def trained_modules(model: nn.Module) -> set[str]:
    """Last names of the modules that hold trained weights."""
    known = LINEAR | {"lm_head", "embed_tokens"}
    names = [name.split(".") for name, weights in model.named_parameters() if weights.requires_grad]
    return {next(part for part in name if part in known) for name in names}


def dtypes(model: nn.Module, trained: bool) -> set[torch.dtype]:
    return {weights.dtype for weights in model.parameters() if weights.requires_grad == trained}


def in_4_bits(model: nn.Module) -> int:
    """How many layers of the base are quantised; peft's own around them are called `Linear4bit` too."""
    names = [name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"]
    return sum(name.endswith(".base_layer") for name in names)


def check(args: ModelArguments) -> None:
    """As a run checks the names of an adapter's modules."""
    check_causal(args, load_causal_config(args))


class TestWhatIsTrained:
    @pytest.mark.parametrize("training_dtype", [torch.float32, torch.bfloat16])
    def test_full_trains_all_weights_in_fp32(self, llama: str, training_dtype: torch.dtype) -> None:
        model = load(ModelArguments(llama), training_dtype)
        assert not isinstance(model, PeftModel)
        assert len(list(model.parameters())) == 2 * 9 + 3  # of two layers, the embedding, the last norm, the output
        assert (dtypes(model, trained=True), dtypes(model, trained=False)) == ({torch.float32}, set())
        assert not model.config.use_cache

    @pytest.mark.parametrize("training_dtype", [torch.float32, torch.bfloat16])
    def test_lora_trains_matrices_in_fp32_on_a_base_in_the_training_dtype(
        self, llama: str, training_dtype: torch.dtype
    ) -> None:
        model = load(ModelArguments(llama, method="lora"), training_dtype)
        assert trained_modules(model) == LINEAR
        assert all("lora_" in name for name, weights in model.named_parameters() if weights.requires_grad)
        assert (dtypes(model, trained=True), dtypes(model, trained=False)) == ({torch.float32}, {training_dtype})

    @pytest.mark.parametrize("training_dtype", [torch.float32, torch.bfloat16])
    def test_qlora_keeps_bf16_where_it_does_not_quantise(self, llama: str, training_dtype: torch.dtype) -> None:
        model = load(ModelArguments(llama, method="qlora"), training_dtype)
        assert trained_modules(model) == LINEAR
        assert dtypes(model, trained=False) == {torch.bfloat16}
        assert in_4_bits(model) == 2 * len(LINEAR)
        layer = model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj.base_layer")
        assert layer.weight.shape == (64 * 64 // 4, 1)  # four weights of 4 bits in each bf16
        assert (layer.compute_dtype, layer.weight.quant_state.nested) == (torch.bfloat16, True)

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_dora_trains_a_length_for_each_output_too(self, llama: str, method: Method) -> None:
        model = load(ModelArguments(llama, method=method, use_dora=True, lora_target_modules=["k_proj"]))
        trained = {name.split(".", 7)[-1] for name, weights in model.named_parameters() if weights.requires_grad}
        assert trained == {"lora_A.default.weight", "lora_B.default.weight", "lora_magnitude_vector.default.weight"}
        layer = "base_model.model.model.layers.1.self_attn.k_proj.lora_magnitude_vector.default"
        assert model.get_submodule(layer).weight.shape == (64,)

    @pytest.mark.parametrize(("use_rslora", "scale"), [(False, 2.0), (True, 8.0)])
    def test_rslora_divides_by_the_root_of_the_rank(self, llama: str, use_rslora: bool, scale: float) -> None:
        model = load(ModelArguments(llama, method="lora", lora_r=16, lora_alpha=32, use_rslora=use_rslora))
        scales = [module.scaling["default"] for module in model.modules() if isinstance(module, LoraLayer)]
        assert scales == [scale] * 2 * len(LINEAR)

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_modules_to_save_are_trained_whole(self, llama: str, tmp_path: Path, method: Method) -> None:
        args = ModelArguments(llama, method=method, modules_to_save=["lm_head", "embed_tokens"])
        model = load(args)
        assert trained_modules(model) == {*LINEAR, "lm_head", "embed_tokens"}
        assert not any("lm_head" in name and "lora_" in name for name, _ in model.named_parameters())
        train(model)
        base: Any = AutoModelForCausalLM.from_pretrained(llama)
        trained = model.base_model.model.lm_head.modules_to_save.default.weight
        assert not torch.equal(trained.float(), base.lm_head.weight.float())
        model.save_pretrained(str(tmp_path / "out"))
        save_adapter_extras(model, tmp_path / "out")
        again = load_trained(tmp_path / "out", kind=AutoModelForCausalLM, dtype=torch.float32)
        torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)

    def test_transformers_opens_an_adapters_folder_with_its_base(self, llama: str, tmp_path: Path) -> None:
        model = load(ModelArguments(llama, method="lora"))
        train(model)
        model.save_pretrained(str(tmp_path / "out"))
        save_adapter_extras(model, tmp_path / "out")
        opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        torch.testing.assert_close(opened(input_ids=IDS).logits, model(input_ids=IDS).logits)

    def test_the_output_layer_gets_no_matrices(self, llama: str) -> None:
        model = load(ModelArguments(llama, method="lora"))
        assert type(model.get_output_embeddings()) is nn.Linear

    @pytest.mark.parametrize("method", ["full", "lora"])
    def test_it_will_stop_where_answers_end(self, llama: str, method: Method) -> None:
        args = ModelArguments(llama, method=method)
        model = load_causal(args, load_tokenizer(args), torch.float32, ends=[2, 5])
        assert model.generation_config.eos_token_id == [2, 5]

    def test_it_will_stop_where_its_bases_answers_end_too(self, llama: str) -> None:
        """As Gemma at <end_of_turn>; 7 is a word, which a configuration names for want of another."""
        GenerationConfig(eos_token_id=[1, 7]).save_pretrained(llama)  # type: ignore[no-untyped-call]
        args = ModelArguments(llama)
        model = load_causal(args, load_tokenizer(args), torch.float32, ends=[5])
        assert model.generation_config.eos_token_id == [1, 2, 5]

    def test_one_whose_text_has_a_configuration_of_its_own_names_them_there(self, tmp_path: Path) -> None:
        text = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": 2}
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        folder = written(tmp_path / "gemma3", Gemma3Config(text_config=text, vision_config=vision | SMALL_IMAGE))
        GenerationConfig(eos_token_id=1).save_pretrained(folder)  # type: ignore[no-untyped-call]
        args = ModelArguments(folder)
        model = load_causal(args, load_tokenizer(args), torch.float32, ends=[5])
        assert model.generation_config.eos_token_id == [1, 2, 5]

    def test_a_padding_token_is_the_tokenizers_and_keeps_its_row(self, llama: str) -> None:
        model = load(ModelArguments(llama))
        assert model.config.pad_token_id == 2
        assert model.model.embed_tokens.padding_idx is None


class TestDropout:
    @pytest.mark.parametrize("method", ["full", "lora", "qlora"])
    def test_none_leaves_nothing_to_chance(self, llama: str, method: Method) -> None:
        config = AutoConfig.from_pretrained(llama)
        config.attention_dropout = 0.1
        config.save_pretrained(llama)
        model = load(ModelArguments(llama, method=method, dropout=0.0, lora_dropout=0.5))
        assert model.config.attention_dropout == 0.0
        assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} <= {0.0}
        model.train()
        assert torch.equal(model(input_ids=IDS).logits, model(input_ids=IDS).logits)

    def test_without_the_flag_the_checkpoints_own_and_the_adapters_own_stay(self, llama: str) -> None:
        config = AutoConfig.from_pretrained(llama)
        config.attention_dropout = 0.1
        config.save_pretrained(llama)
        model = load(ModelArguments(llama, method="lora", lora_dropout=0.25))
        assert model.config.attention_dropout == 0.1
        assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}


class TestRefusals:
    def test_a_target_without_a_match_is_refused_with_the_known_names(self, llama: str) -> None:
        args = ModelArguments(llama, method="lora", lora_target_modules=["q_proj", "query", "wv"])
        known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        with refused("no-such-module", "query wv", known, flag="--lora_target_modules"):
            check(args)

    def test_matrices_on_the_output_layer_would_not_be_trained(self, llama: str) -> None:
        args = ModelArguments(llama, method="lora", lora_target_modules=["q_proj", "lm_head"])
        with refused("lora-on-output-layer", flag="--lora_target_modules"):
            check(args)

    def test_an_unknown_module_to_save_is_refused_with_the_known_names(self, llama: str) -> None:
        args = ModelArguments(llama, method="lora", modules_to_save=["lm_head", "embed_token"])
        with refused("no-such-module", "embed_token", "act_fn, down_proj, embed_tokens", flag="--modules_to_save"):
            check(args)

    @pytest.mark.parametrize("method", ["full", "lora", "qlora"])
    def test_a_checkpoint_without_an_output_layer(self, saved: Callable[[str], str], method: Method) -> None:
        folder = saved("llama")
        with refused("causal-weights-missing", "lm_head.weight", folder, flag="--model_name_or_path"):
            load(ModelArguments(folder, method=method))
        with refused("model-not-trained", "lm_head.weight", folder, flag="--model"):
            load_trained(folder, kind=AutoModelForCausalLM, dtype=torch.float32)

    def test_an_output_layer_that_is_the_embedding_is_not_missing(self, tmp_path: Path) -> None:
        config = CONFIGS["llama"]()
        config.tie_word_embeddings = True
        model = load(ModelArguments(written(tmp_path / "tied", config)))
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_all_weights_of_a_quantised_checkpoint_cannot_be_trained(self, tmp_path: Path) -> None:
        folder = written(tmp_path / "nf4", CONFIGS["llama"](), quantization_config=nf4_config())
        with refused("full-of-quantised", folder, flag="--method"):
            load(ModelArguments(folder))

    def test_rows_longer_than_the_model_has_positions_for(self, llama: str) -> None:
        config = load_causal_config(ModelArguments(llama))
        check_max_length(config, 64)
        with refused("max-length-over-positions", "65", "64 positions", llama, flag="--max_length"):
            check_max_length(config, 65)

    def test_a_tokenizer_of_another_model(self, llama: str) -> None:
        args = ModelArguments(llama)
        tokenizer = load_tokenizer(args)
        tokenizer.add_tokens([f"word{number}" for number in range(118)])
        with refused("token-id-without-row", "128 rows"):
            load_causal(args, tokenizer, torch.float32, ends=[2])

    def test_an_encoder_is_no_causal_language_model(self, tmp_path: Path) -> None:
        AutoConfig.for_model("vit").save_pretrained(tmp_path)
        with refused("no-model-for-task", "causal language model", "vit", flag="--model_name_or_path"):
            load_causal_config(ModelArguments(str(tmp_path)))

    @pytest.mark.parametrize("reads", ["AutoConfig", "weights"])
    def test_a_gated_model(self, llama: str, monkeypatch: pytest.MonkeyPatch, reads: str) -> None:
        """The Hub tells at the configuration, or at the weights where the configuration is in the local cache."""
        name = "meta-llama/Llama-3.1-8B"

        def gated(*_: Any, **__: Any) -> Any:
            response = httpx2.Response(401, request=httpx2.Request("HEAD", "https://hub"))
            raise OSError("transformers' own words") from GatedRepoError("401", response=response)

        if reads == "AutoConfig":
            monkeypatch.setattr(AutoConfig, "from_pretrained", gated)
        else:
            config = AutoConfig.from_pretrained(llama)
            monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
            monkeypatch.setattr("indictune.models.trusted_files.has_file", gated)
        with refused("model-gated", f"https://huggingface.co/{name}", flag="--model_name_or_path"):
            load_causal(ModelArguments(name), words_tokenizer(), torch.float32, ends=[2])


class TestPacking:
    @pytest.mark.parametrize("attention", ["eager", "sdpa"])
    @pytest.mark.parametrize("model_type", PACKED_MODELS)
    def test_documents_of_a_pack_do_not_see_each_other(self, model_type: str, attention: str) -> None:
        if (model_type, attention) == ("gemma2", "sdpa"):
            pytest.skip("transformers has no sdpa for Gemma 2")
        sizes = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
        config = AutoConfig.for_model(model_type, **sizes, attn_implementation=attention)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
        documents = [torch.tensor([[7, 3, 9, 4]]), torch.tensor([[5, 8, 6]])]
        packed = {
            "input_ids": torch.cat(documents, 1),
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
            "use_cache": False,
        }
        with torch.no_grad():
            alone = torch.cat([model(input_ids=each, use_cache=False).logits for each in documents], 1)
            torch.testing.assert_close(model(**packed).logits, alone, rtol=1e-5, atol=1e-5)
            leaking = model(**packed, attention_mask=torch.ones(1, 7, dtype=torch.int64)).logits
        assert (leaking[:, 4:] - alone[:, 4:]).abs().max() > 1e-3

    def test_other_models_and_attentions_are_refused(self) -> None:
        check_packing(ModelArguments("some/llama"), CONFIGS["llama"]())
        check_packing(ModelArguments("some/llama", attn_implementation="flash_attention_2"), CONFIGS["llama"]())
        with refused("packing-impossible", "flex_attention", flag="--packing"):
            check_packing(ModelArguments("some/llama", attn_implementation="flex_attention"), CONFIGS["llama"]())
        with refused("packing-impossible", "bert", flag="--packing"):
            check_packing(ModelArguments("some/model"), CONFIGS["bert"]())

    def test_own_code_is_refused_where_it_would_run(self) -> None:
        config = CONFIGS["llama"]()
        config.auto_map = {"AutoModelForCausalLM": "modeling_abacus.Abacus"}
        check_packing(ModelArguments("some/llama"), config)  # transformers' own class is taken
        with refused("packing-impossible", "its own code", flag="--packing"):
            check_packing(ModelArguments("some/llama", trust_remote_code=True), config)
        config.auto_map = {"AutoConfig": "configuration_abacus.Config"}
        check_packing(ModelArguments("some/llama", trust_remote_code=True), config)


class TestWhatIsReadAgain:
    @pytest.mark.parametrize("method", ["full", "lora", "qlora"])
    def test_gives_the_logits_of_the_trained_model(self, llama: str, tmp_path: Path, method: Method) -> None:
        args = ModelArguments(llama, method=method)
        model = load(args)
        before = model.eval()(input_ids=IDS).logits
        train(model)
        logits = model(input_ids=IDS).logits
        assert not torch.allclose(before, logits, atol=1e-2)
        model.save_pretrained(str(tmp_path / "out"))
        save_adapter_extras(model, tmp_path / "out")
        torch.manual_seed(99)
        again = load_trained(tmp_path / "out", kind=AutoModelForCausalLM, dtype=torch.float32)
        assert torch.equal(again.eval()(input_ids=IDS).logits, logits)

    @pytest.mark.parametrize("method", ["lora", "qlora"])
    def test_a_quantised_checkpoint_is_not_quantised_once_more(self, tmp_path: Path, method: Method) -> None:
        folder = written(tmp_path / "nf4", CONFIGS["llama"](), quantization_config=nf4_config())
        model = load(ModelArguments(folder, method=method))
        assert in_4_bits(model) == 2 * len(LINEAR)
        stored = load_file(Path(folder) / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
        read = model.get_submodule("base_model.model.model.layers.1.mlp.up_proj.base_layer").weight
        assert torch.equal(read.view(torch.uint8), stored.view(torch.uint8))
        train(model)
        model.save_pretrained(str(tmp_path / "out"))
        save_adapter_extras(model, tmp_path / "out")
        again = load_trained(tmp_path / "out", kind=AutoModelForCausalLM, dtype=torch.bfloat16)
        assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)

    def test_its_weights_have_the_type_that_is_asked_for(self, llama: str) -> None:
        assert dtypes(load_trained(llama, kind=AutoModelForCausalLM, dtype=torch.bfloat16), trained=True) == {
            torch.bfloat16
        }
        assert dtypes(load_trained(llama, kind=AutoModelForCausalLM, dtype=torch.float32), trained=True) == {
            torch.float32
        }

    def test_a_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with refused("folder-without-model", f"{tmp_path}", flag="--model"):
            load_trained(tmp_path, kind=AutoModelForCausalLM, dtype=torch.float32)
