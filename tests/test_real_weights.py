"""The packages with real weights hold what the benchmark takes them for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from benchmarks.real_weights import MINILM, SMOLLM2, folder_of, write_smollm2


@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, (SMOLLM2, "gguf"))), reason="make outputs/smollm2 installs them")
def test_smollm2_answers_from_a_plain_folder(tmp_path: Path) -> None:
    write_smollm2(tmp_path / "smollm2")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert "quantization_config" not in model.config.to_dict()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**given, max_new_tokens=12, do_sample=False)[0, given["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.skipif(find_spec(MINILM) is None, reason="make outputs/smollm2 installs it")
def test_minilm_puts_like_sentences_near() -> None:
    folder = folder_of(MINILM) / "model"
    model: Any = AutoModel.from_pretrained(folder)
    texts = ["The film was great.", "I loved this movie.", "The bank is closed today."]
    batch = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state * batch["attention_mask"][:, :, None]
    near = torch.nn.functional.normalize(hidden.sum(1), dim=1)
    assert near[0] @ near[1] > 0.3 + near[0] @ near[2]
