"""Programs for a model card that use the model. A test runs each of them."""

from __future__ import annotations

import json
import shlex

from indictune.hub.card_facts import Facts
from indictune.hub.public_text import Verbatim, fenced

_TEXT = "क्या फिल्म थी! 😍"

_PIPELINE = """\
from transformers import pipeline

MODEL = {model}
classify = pipeline("{task}", MODEL)
print(classify({text}{more}))
"""

_ON_A_BASE = """\
from peft import PeftModel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

MODEL = {model}
base = AutoModelForSequenceClassification.from_pretrained({base}, config=AutoConfig.from_pretrained(MODEL))
model = PeftModel.from_pretrained(base, MODEL).merge_and_unload()
classify = pipeline("{task}", model=model, tokenizer=AutoTokenizer.from_pretrained(MODEL))
print(classify({text}{more}))
"""

_CHAT = """\
from transformers import pipeline

MODEL = {model}
answer = pipeline("text-generation", MODEL)
messages = [{{"role": "user", "content": {text}}}]
print(answer(messages, max_new_tokens=64)[0]["generated_text"][-1]["content"])
"""

_ONNX = """\
import onnxruntime
from transformers import AutoConfig, AutoTokenizer

MODEL = {model}
config, tokenizer = AutoConfig.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
session = onnxruntime.InferenceSession(f"{{MODEL}}/model.onnx")
batch = tokenizer([{text}], truncation=True, padding=True, return_tensors="np")
(logits,) = session.run(["logits"], dict(batch))
print({result})
"""

_EXPORTED = {"onnx": (_ONNX, "python"), "gguf": ("llama-cli --model {file} --conversation", "bash")}

# An adapter on a base that is not on the Hub: only its folder says where the base is.
_LOADED = """\
import indictune

MODEL = {model}
model, tokenizer = indictune.load(MODEL)
print(model(**tokenizer({text}, return_tensors="pt")).logits)
"""


def usage_of(facts: Facts) -> Verbatim | None:
    """A program that uses the model; None for a task that only the user knows."""
    task = facts.pipeline_tag
    if task is None:
        return None
    words = {"model": _quoted(facts.model), "base": _quoted(facts.base or ""), "text": _quoted(_TEXT), "task": task}
    words["more"] = _settings(facts)
    words |= {"result": _result(facts), "file": shlex.quote(f"{facts.model}/model.gguf")}
    form, language = _PIPELINE, "python"
    if facts.exported:
        form, language = _EXPORTED[str(facts.exported["format"])]
    elif facts.is_adapter and facts.base is None:
        form = _LOADED
    elif task == "text-generation":
        form = _CHAT
    elif facts.is_adapter:
        form = _ON_A_BASE
    return fenced(form.format(**words).rstrip(), language)


def _settings(facts: Facts) -> str:
    """Further arguments of a pipeline: what it has to return."""
    if facts.pipeline_tag == "token-classification":
        return ""
    kinds = {"regression": ', function_to_apply="none"', "multi_label_classification": ", top_k=None"}
    return ", truncation=True" + kinds.get(str(facts.config.get("problem_type")), "")


def _result(facts: Facts) -> str:
    """What a program shows of logits: the label, where there is one."""
    is_single = facts.config.get("problem_type") in (None, "single_label_classification")
    return (
        "config.id2label[logits[0].argmax()]"
        if is_single and facts.pipeline_tag == "text-classification"
        else "logits"
    )


def _quoted(text: str) -> str:
    """A text as a string of Python."""
    return json.dumps(text, ensure_ascii=False)
