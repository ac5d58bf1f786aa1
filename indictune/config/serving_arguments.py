"""Arguments of the commands that show a model to others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from indictune.config.command_arguments import PredictArguments, TalkArguments
from indictune.config.fields import Checked, flag
from indictune.errors import Problem, problem

_PORTS = 65_535


@dataclass
class _ShownModel(Checked):
    """A finished model, and the address where it is shown."""

    command: ClassVar[str]

    model: str = flag("", "The --output_dir of a finished run. May be given as a bare first word.")
    host: str = flag("127.0.0.1", "Address to listen on. The default is reached from this machine alone.")
    port: int = flag(8000, "Port to listen on; 0 takes a free one.")
    trust_remote_code: bool = flag(False, "Run Python code that comes with the model.")
    trust_checkpoint: bool = flag(False, "Read weights without a safetensors file: pickles, which can run code.")

    def check(self) -> Iterator[Problem]:
        """Refuse no model, and an impossible port."""
        yield from super().check()
        if not self.model:
            yield problem("command-needs-model", "--model", command=self.command)
        if self.port > _PORTS:
            yield problem("port-unknown", "--port", self.port, most=_PORTS)

    @property
    def name(self) -> str:
        """Of the model, as others read it: without the path to its folder."""
        return Path(self.model).resolve().name


@dataclass
class ServeArguments(_ShownModel):
    """Which finished classifier is served, where, and within which limits. Other values default to its training's."""

    command = "serve"

    max_batch_size: int = flag(64, "Most texts that are labelled together. They may come from several requests.")
    max_texts: int = flag(256, "Most texts of a request.")
    max_characters: int = flag(10_000, "Most characters of a text.")
    max_request_bytes: int = flag(1_000_000, "Largest body of a request, in bytes.")
    max_waiting_texts: int = flag(10_000, "Most texts that wait. Further requests get status 503.")
    requests_per_minute: int = flag(6_000, "Most requests of a client in a minute; 0 for no limit.")
    max_length: int | None = flag(None, "Cut texts to this many tokens. Default: as in training.")
    max_tokens_per_device: int | None = flag(
        None, "Most tokens that are computed at once. Default: 2048 on a CPU, 32768 on a GPU."
    )
    calibrated: bool = flag(
        False, "Divide logits by the temperature that the run fitted on its validation rows. Labels stay the same."
    )
    bf16: bool | None = flag(None, "Compute in bf16. Default: as in training.")
    fp16: bool | None = flag(None, "Compute in fp16. Default: as in training.")

    def check(self) -> Iterator[Problem]:
        """Refuse a request that could never be accepted, too."""
        yield from super().check()
        if self.max_waiting_texts < self.max_texts:
            yield problem("fewer-wait-than-come", "--max_waiting_texts", self.max_waiting_texts, texts=self.max_texts)

    @property
    def reading(self) -> PredictArguments:
        """How texts are read."""
        return PredictArguments(
            model=self.model,
            max_length=self.max_length,
            calibrated=self.calibrated,
            trust_remote_code=self.trust_remote_code,
            trust_checkpoint=self.trust_checkpoint,
            bf16=self.bf16,
            fp16=self.fp16,
        )


@dataclass
class DemoArguments(_ShownModel):
    """Which finished model is shown on a page, and where."""

    command = "demo"

    port: int = flag(7860, "Port to listen on; 0 takes a free one.")
    export: str | None = flag(
        None, "Write a folder that a Space of the Hub runs, instead of starting the page. Must not exist, or be empty."
    )
    max_new_tokens: int | None = flag(None, "Most tokens of an answer of a language model. Default: 256.")
    temperature: float | None = flag(
        None, "How a language model draws tokens: 0, the default, takes the likeliest one. 1 is usual."
    )

    @property
    def reading(self) -> PredictArguments:
        """How a classifier reads texts."""
        trust_code, trust_pickles = self.trust_remote_code, self.trust_checkpoint
        return PredictArguments(model=self.model, trust_remote_code=trust_code, trust_checkpoint=trust_pickles)

    @property
    def talking(self) -> TalkArguments:
        """How a language model answers."""
        given = {name: value for name, value in self.of_answers.items() if value is not None}
        trust_code, trust_pickles = self.trust_remote_code, self.trust_checkpoint
        return TalkArguments(self.model, **given, trust_remote_code=trust_code, trust_checkpoint=trust_pickles)

    @property
    def of_answers(self) -> dict[str, Any]:
        """The flags of a language model on this machine."""
        return {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
