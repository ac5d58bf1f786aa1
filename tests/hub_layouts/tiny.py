"""Parts of tiny repositories: tokenizers of invented texts, random weights, and the forms both are kept in."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

WORDS = (
    "यह बहुत अच्छी फ़िल्म है और कहानी सुंदर थी",
    "मुझे यह गाना पसंद नहीं आया क्योंकि आवाज़ खराब थी",
    "हा चित्रपट खूप छान आहे पण शेवट वाईट होता",
    "ఈ సినిమా చాలా బాగుంది కానీ పాట బాగాలేదు",
    "இந்த படம் மிகவும் நன்றாக இருக்கிறது ஆனால் முடிவு மோசம்",
    "the film is very good but the song was bad and the end is sad",
    "a short question and a long answer about water, rice and rain in the hills",
)


Files = dict[str, bytes]
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DECODER: dict[str, Any] = SMALL | {"num_key_value_heads": 1, "initializer_range": 0.02}
PAGE = b"---\nlicense: mit\n---\nA tiny model with random weights.\n"


def as_json(content: Any) -> bytes:
    """A JSON file as transformers writes it."""
    return (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode()


def special_tokens(**tokens: str) -> bytes:
    """A `special_tokens_map.json` of plain texts."""
    return as_json({f"{name}_token": token for name, token in tokens.items()})


def saved_tokenizer(tokenizer: Tokenizer) -> bytes:
    """The `tokenizer.json` of it."""
    return tokenizer.to_str(pretty=True).encode()


@cache
def wordpiece(specials: tuple[str, ...], size: int = 600, lowercase: bool | None = None) -> Tokenizer:
    """A WordPiece tokenizer of a BERT.

    Args:
        lowercase: None has no normaliser and splits by white space, as IndicBERT v2's; else as BERT's.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    if lowercase is None:
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    else:
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(specials), show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return tokenizer


@cache
def sentencepiece_model(size: int = 300, **settings: Any) -> bytes:
    """A unigram model of sentencepiece, as ALBERT, XLM-R and LLaMA have one."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS * 20), model_writer=model, vocab_size=size, hard_vocab_limit=False,
        minloglevel=2, num_threads=1, **settings,
    )  # fmt: skip
    return model.getvalue()


@cache
def byte_level(specials: tuple[str, ...], size: int = 600) -> Tokenizer:
    """A byte-level BPE, as Llama 3, Qwen and ModernBERT have one. Its special tokens come after its words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


@cache
def byte_fallback(specials: tuple[str, ...], size: int = 600, others: tuple[str, ...] = ()) -> Tokenizer:
    """A BPE over sentencepiece's marks of spaces, with bytes for what it lacks, as LLaMA 2 and Gemma have one.

    Args:
        others: added tokens that are not special.
    """
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(WORDS, trainer)
    # The bytes are words of the vocabulary, not special tokens of the tokenizer.
    again: dict[str, Any] = json.loads(tokenizer.to_str())
    again["added_tokens"] = [each for each in again["added_tokens"] if each["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(again))
    tokenizer.add_tokens([AddedToken(each, special=False) for each in others])
    name = specials[1] if specials[0] == "<unk>" else specials[2]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", pair=f"{name} $A {name}:1 $B:1", special_tokens=[(name, tokenizer.token_to_id(name))]
    )
    return tokenizer


def random_weights(
    kind: type[nn.Module], config: Any, dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, torch.Tensor]:
    """The state of a model with random weights, the same ones for the same seed; tied weights share their storage."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).to(dtype)
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def pickled(weights: Mapping[str, torch.Tensor], is_zip: bool = True) -> bytes:
    """A `.bin` file: of today, or as torch wrote it before 1.6."""
    file = io.BytesIO()
    torch.save(dict(weights), file, _use_new_zipfile_serialization=is_zip)
    return file.getvalue()


def safe(weights: Mapping[str, torch.Tensor], tied: Sequence[str] = ()) -> bytes:
    """A safetensors file, without the weights that are tied to others."""
    kept = {name: tensor.contiguous().clone() for name, tensor in weights.items() if name not in tied}
    return save(kept, metadata={"format": "pt"})


def sharded(
    weights: Mapping[str, torch.Tensor], number: int, tied: Sequence[str] = (), is_safe: bool = True
) -> dict[str, bytes]:
    """So many files and their index."""
    names = [name for name in weights if name not in tied]
    size = -(-len(names) // number)
    begin, end = ("model", "safetensors") if is_safe else ("pytorch_model", "bin")
    files, places = dict[str, bytes](), dict[str, str]()
    for shard in range(number):
        file = f"{begin}-{shard + 1:05}-of-{number:05}.{end}"
        part = {name: weights[name] for name in names[shard * size : (shard + 1) * size]}
        files[file] = safe(part) if is_safe else pickled(part)
        places |= dict.fromkeys(part, file)
    bytes_of_all = sum(weights[name].nbytes for name in names)
    index = f"{begin}.{end}.index.json"
    return files | {index: as_json({"metadata": {"total_size": bytes_of_all}, "weight_map": places})}


def vocabulary_file(tokenizer: Tokenizer) -> bytes:
    """A `vocab.txt` of BERT: a token on each line, in the order of the ids."""
    vocabulary = tokenizer.get_vocab()
    return "".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__)).encode()
