"""Clean social-media text in Indian scripts. Cleaning changes how a text is written, never its words."""

from __future__ import annotations

import html
import os
import re
import signal
import subprocess
import sys
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from html.entities import html5
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from indictune.data.bad_rows import Batches
from indictune.data.columns import BETWEEN_TEXTS, normalise_label
from indictune.data.languages import languages_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The placeholders that XLM-T and the cardiffnlp models were trained with.
URL_PLACEHOLDER = "http"
HANDLE_PLACEHOLDER = "@user"

# What becomes no piece of a vocabulary: digits, e-mail addresses and user names, except the placeholder.
PRIVATE = re.compile(rf"(?<![^\s@＠])[^\s@＠]*[@＠](?!{HANDLE_PLACEHOLDER[1:]}\b)\S*|\d+")

# `\w` alone cuts Indian words in two: it knows letters and digits, but no vowel sign, virama or joiner.
WORD = r"\w\u0300-\u036f\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff\u1cd0-\u1cff\ua8e0-\ua8ff\u200c\u200d"
LETTER_OF_TAG = r"(?=[\d_]*[^\W\d_])"

# Control characters, line and paragraph separators, the zero-width space (a word boundary) and lone surrogates.
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200b\ud800-\udfff]")
# Soft hyphen, bidi marks, word joiner, byte order mark and their like: invisible, and no boundary of a word. ZWJ and
# ZWNJ (U+200D, U+200C) and the tag characters of flags (U+E0020 to U+E007F) are meant and stay.
INVISIBLE = re.compile(r"[\xad\u061c\u180e\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0001]")
# Only whole names with their semicolon: a browser also reads "&not" in "R&notes", which would lose letters.
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});")

# A URL ends before a letter of another script that follows its own letters (tweets glue the next word to it), goes on
# into such letters after a separator (/wiki/हिन्दी), and leaves the punctuation of the sentence alone.
_URL_END = r"[A-Za-z0-9/_=&#%+~$*@\-]"
_URL_FOREIGN = r"(?<=[/_=.?&%+#\-])[\u00c0-\u024f\u0620-\u06d3\u0900-\u0963\u0966-\u0dff\u200c\u200d]+"
_URL_TAIL = rf"(?:\([^\s()]*\)|[.,;:!?']*(?:{_URL_END}|{_URL_FOREIGN}))"
_HOSTS = r"t\.co|pic\.twitter\.com|bit\.ly|goo\.gl|youtu\.be|youtube\.com|fb\.me|wa\.me"
URL = re.compile(
    rf"https?://{_URL_TAIL}*|(?<![A-Za-z0-9.@])(?:www\.(?=[A-Za-z0-9])|(?:{_HOSTS})/){_URL_TAIL}+"
    # As corpora of tokenised tweets write a link, cut short or not: "https // t . co / oxf8tr3bly", "https // t . c".
    r"|(?<![A-Za-z0-9])https?(?: :)? //(?!\S)(?: t\b(?: \.)?(?: co?\b)?(?: /(?: [A-Za-z0-9]{1,10}\b)?)?)?",
    re.IGNORECASE,
)
# After a Latin letter or digit an @ belongs to an e-mail address. "@100" is a price: a handle has a letter. Tokenised
# corpora write "@ user123 _ rest".
HANDLE = re.compile(r"(?<![A-Za-z0-9_])[@＠](?:(?=[0-9_]*[A-Za-z])[A-Za-z0-9_]+| user[0-9]+(?: _+ [A-Za-z0-9]+)*)")
_HASHTAGS = re.compile(rf"(?<![{WORD}&/])(?:[#＃]{LETTER_OF_TAG}[{WORD}]+)+")
_TAG_SEPARATORS = re.compile(r"[#＃_]")
TOUCHING = frozenset(" !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~“”‘’…।॥")


def clean(text: str) -> str:
    """The text as the model sees it: one spelling of every character, placeholders, single spaces.

    - Unicode NFC; ZWJ and ZWNJ stay, because they change words. Letters, digits, case, danda and punctuation stay.
    - A URL becomes `http`, an @handle `@user`. The @ of an e-mail address is no handle.
    - Emoji stay whole. A hashtag stays as its words: `#चलो_दिल्ली` becomes `चलो दिल्ली`.
    - HTML entities (`&amp;`) become their characters; line breaks and control characters become a space.
    - Invisible format characters that separate nothing (soft hyphen, bidi marks, byte order mark) are left out.

    Cleaning a cleaned text changes nothing, so a text can pass through here twice, in training and in serving.
    """
    # One step can uncover work for another ("&amp;#64;user", "#a_@b"). Every change removes an entity, URL, handle or
    # tag, so this ends; a plain text passes once.
    while (cleaned := _clean_once(text)) != text:
        text = cleaned
    return text


def _clean_once(text: str) -> str:
    # The searches for a character come first because most tweets have nothing to replace.
    if not text.isprintable():  # as no text with a break or an invisible character is
        text = INVISIBLE.sub("", BREAKS.sub(" ", text))
    if "&" in text:
        text = _ENTITY.sub(_entity, text)
    text = unicodedata.normalize("NFC", text)
    if "/" in text or ("." in text and "www." in text.lower()):
        text = URL.sub(lambda match: _apart(match, URL_PLACEHOLDER), text)
    if "#" in text or "＃" in text:
        text = _HASHTAGS.sub(lambda match: _apart(match, _TAG_SEPARATORS.sub(" ", match[0][1:])), text)
    if "@" in text or "＠" in text:
        text = HANDLE.sub(lambda match: _apart(match, HANDLE_PLACEHOLDER), text)
    if "  " in text or not text.isprintable() or text.strip() != text:  # printable text has no other white space
        text = " ".join(text.split())
    return text


def _entity(match: re.Match[str]) -> str:
    entity = match[0]
    if entity.startswith("&#"):
        # One for a character that does not exist, such as "&#1;", is unescaped to nothing: keep the words apart.
        return html.unescape(entity) or " "
    return html5.get(entity[1:], entity)


def _apart(match: re.Match[str], new: str) -> str:
    """`new`, with a space on each side where a word or an emoji touches it."""
    before = match.string[match.start() - 1 : match.start()]
    after = match.string[match.end() : match.end() + 1]
    return ("" if not before or before in TOUCHING else " ") + new + ("" if not after or after in TOUCHING else " ")


_READ = ("text", "text_pair", "label", "language", "line")
SCHEMA = pa.schema([("text", pa.string()), ("label", pa.string()), ("language", pa.string()), ("line", pa.int64())])
_MAX_WORKERS = 8  # one process reads a file as fast as four clean it (benchmarks/scale.py)


def usable_cores(asked: int | None) -> int:
    """The processes asked for, or one for each core that this process may use, by its affinity and its cgroup."""
    from joblib import cpu_count  # slow to import

    return asked or min(int(cpu_count()), _MAX_WORKERS)


_WAITING = 3  # batches for each core, so that none waits for this process
_on_cluster = False


@contextmanager
def on_cluster() -> Iterator[None]:
    """A block in which rows are cleaned and tokenised by the Ray cluster that this process has joined."""
    global _on_cluster
    _on_cluster = True
    try:
        yield
    finally:
        _on_cluster = False


def is_on_cluster() -> bool:
    """Whether this process is in such a block."""
    return _on_cluster


def spread(make: Callable[[pa.RecordBatch], pa.RecordBatch], batches: Batches) -> Batches:
    """`make` of each batch, in order. Ray makes those of a lost node again."""
    import ray

    task, made = ray.remote(max_retries=-1)(make_one), deque[ray.ObjectRef[pa.RecordBatch]]()
    function = ray.put(make)
    most = _WAITING * max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]
    for batch in batches:
        made.append(task.remote(function, batch))
        if len(made) >= most:
            yield ray.get(made.popleft())
    while made:
        yield ray.get(made.popleft())


def make_one(make: Callable[[pa.RecordBatch], pa.RecordBatch], batch: pa.RecordBatch) -> pa.RecordBatch:
    """The task of the cluster."""
    return make(batch)


def cleaned(batches: Batches, processes: int) -> Batches:
    """`clean_batch` of each batch, in order; several batches use so many processes.

    Columns are `text`, `label`, `language` and, of pairs, `text_pair` (nullable strings), and `line` (int64).
    """
    if is_on_cluster():
        yield from spread(clean_batch, batches)
        return
    first = list(islice(batches, 2))
    if len(first) < 2 or processes == 1:
        yield from map(clean_batch, chain(first, batches))
        return
    with ExitStack() as stack:
        workers = [stack.enter_context(closing(_Worker())) for _ in range(processes)]
        idle, busy = deque(workers), deque[_Worker]()
        for batch in chain(first, batches):
            if not idle:
                idle.append(busy.popleft())
                yield idle[0].result()
            worker = idle.popleft()
            worker.send(batch)
            busy.append(worker)
        for worker in busy:
            yield worker.result()


def clean_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with cleaned texts, labels in one spelling and a language in every row.

    `text` has both texts of a pair with `BETWEEN_TEXTS` between them, which no cleaned text contains; that alone if
    one of them has no words.
    """
    texts = [clean(text or "") for text in batch["text"].to_pylist()]
    if "text_pair" in batch.schema.names:
        seconds = [clean(text or "") for text in batch["text_pair"].to_pylist()]
        pairs = zip(texts, seconds, strict=True)
        texts = [f"{first}{BETWEEN_TEXTS}{second}" if first and second else BETWEEN_TEXTS for first, second in pairs]
    labels = batch["label"].to_pylist()
    spellings = {label: normalise_label(label) for label in set(labels)}
    columns = (texts, [spellings[label] for label in labels], _languages(batch, texts))
    arrays = [pa.array(column, pa.string()) for column in columns]
    return pa.record_batch([*arrays, batch["line"]], schema=SCHEMA)


def as_written(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with a language in each, and their texts as they are; a blank one becomes empty."""
    texts = [text if text and text.strip() else "" for text in batch["text"].to_pylist()]
    arrays = [pa.array(texts, pa.string()), batch["label"], pa.array(_languages(batch, texts), pa.string())]
    return pa.record_batch([*arrays, batch["line"]], schema=SCHEMA)


def _languages(batch: pa.RecordBatch, texts: Sequence[str]) -> list[str]:
    """The language of each row, or where it names none, that of its text."""
    if batch["language"].null_count == batch.num_rows:
        return languages_of(text.replace(BETWEEN_TEXTS, " ") for text in texts)
    languages = [(language or "").strip() for language in batch["language"].to_pylist()]
    unnamed = [index for index, language in enumerate(languages) if not language]
    of_unnamed = languages_of(texts[index].replace(BETWEEN_TEXTS, " ") for index in unnamed)
    for index, language in zip(unnamed, of_unnamed, strict=True):
        languages[index] = language
    return languages


class _Worker:
    """A process that cleans one batch at a time; they travel through pipes as Arrow streams.

    It is not a `multiprocessing` pool. Forked workers would keep our file locks after this process is killed, and
    wait forever. Spawned workers would first import the training script, which takes seconds. This process imports
    only Arrow, inherits no open files, and ends with its input.

    `-P` and PYTHONPATH let it find modules where this process does. Otherwise `-m` looks in the current folder first,
    which may hold someone else's files.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "indictune.data.text.cleaning"]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "RAYON_NUM_THREADS": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
        self._input: pa.RecordBatchStreamWriter | None = None

    @cached_property
    def _output(self) -> pa.RecordBatchStreamReader:
        return pa.ipc.open_stream(self._process.stdout)

    def send(self, batch: pa.RecordBatch) -> None:
        """Send a batch. The previous result must have been taken."""
        assert self._process.stdin is not None
        read = batch.select([name for name in _READ if name in batch.schema.names])
        try:
            self._input = self._input or pa.ipc.new_stream(self._process.stdin, read.schema)
            self._input.write_batch(read)
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def result(self) -> pa.RecordBatch:
        """Wait for the cleaned batch."""
        try:
            return self._output.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> RuntimeError:
        code = self._process.wait()
        return RuntimeError(f"A process that cleans rows ended with code {code}; was there too little memory?")

    def close(self) -> None:
        """End the process: all results were taken, or nobody needs them."""
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":  # clean batches until the input ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with pa.ipc.open_stream(sys.stdin.buffer) as given, pa.ipc.new_stream(sys.stdout.buffer, SCHEMA) as results:
        for each in given:
            results.write_batch(clean_batch(each))
            sys.stdout.buffer.flush()


# Bengali, Gurmukhi, Gujarati, Oriya, Tamil, Telugu, Kannada and Malayalam: Unicode gives each a block that is laid
# out as Devanagari's. AI4Bharat's programs write texts for the model by these offsets (indic-nlp-library 0.92,
# `UnicodeIndicTransliterator`).
_BLOCKS = (0x0980, 0x0A00, 0x0A80, 0x0B00, 0x0B80, 0x0C00, 0x0C80, 0x0D00)
_DEVANAGARI, _LETTERS = 0x0900, 0x70


def write_devanagari(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a fast tokenizer, and what is saved of it, write all Indic scripts in Devanagari before it splits a text."""
    import sentencepiece  # which few models need
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    from tokenizers import normalizers

    pairs = [(block + letter, _DEVANAGARI + letter) for block in _BLOCKS for letter in range(_LETTERS)]
    with TemporaryDirectory() as folder:
        rules = Path(folder, "rules.tsv")
        rules.write_text("".join(f"{old:X}\t{new:X}\n" for old, new in pairs), encoding="ascii")
        sentencepiece.set_min_log_level(2)
        made = sentencepiece.SentencePieceNormalizer(rule_tsv=str(rules), add_dummy_prefix=False)
    proto = ModelProto()
    proto.ParseFromString(made.serialized_model_proto())
    steps = [normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap)]
    backend = cast(Any, tokenizer).backend_tokenizer
    steps += [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence(steps)
