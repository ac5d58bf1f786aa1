"""The HTTP interface of a classifier: labels, health, and a page that describes both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from indictune.config.shared_arguments import RequestLimits
from indictune.errors import problem
from indictune.prediction.labelled_rows import as_records, label, rounded, text_batch
from indictune.prediction.served_classifier import Classifier
from indictune.serving.server import Limits, RefusedError, refusal
from indictune.versions import __version__

_EXAMPLES = ["बहुत अच्छी फिल्म थी 😍", "worst movie ever"]
_Record = dict[str, Any]
_Waiting = tuple[str, "asyncio.Future[_Record]"]


class Batches:
    """A queue of texts in front of a model, which one thread runs.

    A batch takes what waits when the model becomes free. So nobody waits for a batch to fill up.
    """

    def __init__(self, label: Callable[[Sequence[str]], list[_Record]], max_batch_size: int, max_waiting: int) -> None:
        self._label = label
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "model")

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return self._queue.qsize()

    async def label(self, texts: Sequence[str]) -> list[_Record]:
        """The records of some texts, when `run` has come to them; a `RefusedError` if the queue has no room."""
        if self.waiting + len(texts) > self._max_waiting:
            raise RefusedError(503, problem("server-busy", value=self.waiting), {"Retry-After": "1"})
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[_Record]] = [loop.create_future() for _ in texts]
        for each in zip(texts, futures, strict=True):
            self._queue.put_nowait(each)
        return await asyncio.gather(*futures)

    async def run(self) -> None:
        """Label batch after batch, until cancelled."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._max_batch_size and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            batch = [each for each in batch if not each[1].done()]  # else its request was given up
            answers = await self._answers([text for text, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    async def _answers(self, texts: Sequence[str]) -> list[_Record | Exception]:
        """The records of a batch. If it fails, each text is tried alone: only the one at fault gets the error."""
        try:
            return [*await asyncio.get_running_loop().run_in_executor(self._thread, self._label, texts)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [answer for text in texts for answer in await self._answers([text])]


def encodable(text: str) -> str:
    """A text; a `ValueError` if JSON's escapes have put half a character into it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair is no character") from error
    return text


class Texts(BaseModel):
    """Texts to label, as they are written."""

    model_config = ConfigDict(extra="forbid")
    texts: list[Annotated[str, AfterValidator(encodable)]] = Field(min_length=1, examples=[_EXAMPLES])


class Labelled(BaseModel):
    """A text with its label, as `indictune predict` writes it."""

    text: str
    label: str | float | list[str] | None = Field(description="null for a text without words")
    scores: dict[str, float | None] | None = Field(None, description="of each label; absent for a regression")
    language: str | None


class LabelledTexts(BaseModel):
    """A label for each text, in their order."""

    predictions: list[Labelled]


class ServerHealth(BaseModel):
    """What is served."""

    status: str
    model: str
    labels: list[str]
    waiting_texts: int


class Failure(BaseModel):
    """Why a request was refused."""

    code: str
    message: str


def create_app(classifier: Classifier, name: str, limits: RequestLimits) -> FastAPI:
    """The application. Its model is ready when this returns."""

    def labelled(texts: Sequence[str]) -> list[dict[str, Any]]:
        return [rounded(row) for row in as_records(label(classifier, text_batch(texts)))]

    labelled(_EXAMPLES)  # the first texts take longest
    batches = Batches(labelled, limits.max_batch_size, limits.max_waiting_texts)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batches.run())
        yield
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running

    about = _described(name, limits)
    app = FastAPIOffline(title="indictune", version=__version__, description=about, lifespan=lifespan)
    app.add_middleware(Limits, max_bytes=limits.max_request_bytes, per_minute=limits.requests_per_minute)
    _answer_errors(app)

    @app.post("/predict", response_model=LabelledTexts, responses=_FAILURES)
    async def predict(given: Texts) -> JSONResponse:
        """Label texts."""
        _check(given.texts, limits)
        return JSONResponse({"predictions": await batches.label(given.texts)})

    @app.get("/health")
    async def health() -> ServerHealth:
        """Whether the server answers, and for which model."""
        labels = list(classifier.served.labels)
        return ServerHealth(status="ok", model=name, labels=labels, waiting_texts=batches.waiting)

    return app


_FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Failure} for status in (413, 422, 429, 503)}


def _described(name: str, limits: RequestLimits) -> str:
    per_minute = limits.requests_per_minute
    rate = f" A client may send {per_minute:,} requests a minute." if per_minute else ""
    return (
        f"Labels by {name}. A request has at most {limits.max_texts:,} texts of {limits.max_characters:,} characters "
        f"each, and {limits.max_request_bytes:,} bytes in all.{rate}"
    )


def _check(texts: Sequence[str], limits: RequestLimits) -> None:
    if len(texts) > limits.max_texts:
        raise RefusedError(413, problem("too-many-texts", value=len(texts), most=limits.max_texts))
    for number, text in enumerate(texts):
        if len(text) > limits.max_characters:
            place = f"texts[{number}]"
            raise RefusedError(413, problem("text-too-long", place, len(text), most=limits.max_characters))


def _as_sentence(error: Mapping[str, Any]) -> str:
    """What pydantic or the reader of JSON says, with its place."""
    place = error["loc"][1:]
    if error["type"] == "json_invalid":
        return f"The body is not valid JSON: {error['ctx']['error']} (character {place[0] + 1})"
    return f"{'.'.join(map(str, place)) or 'body'}: {error['msg']}"


def _answer_errors(app: FastAPI) -> None:
    """Give all errors one form, without the texts that they are about."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> JSONResponse:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        found = [_as_sentence(each) for each in error.errors()[:3]]
        return refusal(422, "request-invalid", f"{'. '.join(found)}.")

    @app.exception_handler(HTTPException)
    async def of_http(_: Request, error: HTTPException) -> JSONResponse:
        return refusal(error.status_code, f"http-{error.status_code}", f"{error.detail}. See /docs.", error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return refusal(500, "internal-error", "The model failed on this request. The server's log has the reason.")
