"""The HTTP interface of a classifier: labels, health, and a page that describes both."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

import prometheus_client as prometheus
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from indictune.config.shared_arguments import RequestLimits
from indictune.errors import problem, problems_of
from indictune.prediction.labelled_rows import Text, as_records, label, text_batch
from indictune.prediction.served_classifier import Classifier, Reading, check_pairs
from indictune.prediction.written_rows import rounded
from indictune.serving.server import GUARDED, Limits, RefusedError, client_of, refusal
from indictune.versions import __version__

_EXAMPLE = ("बहुत अच्छी फिल्म थी 😍", "worst movie ever")  # of a pair
_EXAMPLES = [*_EXAMPLE]
_PATHS = (*GUARDED, "/health", "/ready", "/docs", "/openapi.json")
_Record = dict[str, Any]
_Waiting = tuple[Text, "asyncio.Future[_Record]"]


class Batches:
    """Texts that wait for a model, which one thread runs.

    A batch takes what waits when the model becomes free, a text of each client in turn. So nobody waits for a batch to
    fill up, and nobody for all texts of somebody else.
    """

    def __init__(self, label: Callable[[Sequence[Any]], list[_Record]], max_batch_size: int, max_waiting: int) -> None:
        self._label = label
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._queues: dict[str, deque[_Waiting]] = {}  # of each client with texts that wait, the next one first
        self._some_wait = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "model")

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return sum(map(len, self._queues.values()))

    async def label(self, texts: Sequence[Text], client: str = "") -> list[_Record]:
        """The records of some texts, when `run` has come to them. If this is cancelled, they wait no longer.

        Raises:
            RefusedError: as many texts of the client would wait as there is room for texts of others.
        """
        own = self._queues.get(client, deque())
        if (waiting := self.waiting) + len(own) + len(texts) > self._max_waiting:
            raise RefusedError(503, problem("server-busy", value=waiting, what="texts wait"), {"Retry-After": "1"})
        futures: list[asyncio.Future[_Record]] = [asyncio.Future() for _ in texts]
        own.extend(zip(texts, futures, strict=True))
        self._queues[client] = own
        self._some_wait.set()
        try:
            return await asyncio.gather(*futures)
        except BaseException:  # the request is cancelled, or fails by one of its texts
            for future in futures:
                future.cancel()
            if left := deque(each for each in self._queues.pop(client, ()) if not each[1].done()):
                self._queues[client] = left
            raise

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._queues and len(batch) < self._max_batch_size:
            client = next(iter(self._queues))
            queue = self._queues.pop(client)
            batch.append(queue.popleft())
            if queue:
                self._queues[client] = queue  # behind the others
        return batch

    async def run(self) -> None:
        """Label batch after batch, until cancelled."""
        while True:
            await self._some_wait.wait()
            self._some_wait.clear()
            while batch := self._next_batch():
                answers = await self._answers([text for text, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    if future.done():
                        continue
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)

    async def _answers(self, texts: Sequence[Text]) -> list[_Record | Exception]:
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


_Texts = list[Annotated[str, AfterValidator(encodable)]]


class Texts(BaseModel):
    """Texts to label, as they are written."""

    model_config = ConfigDict(extra="forbid")
    texts: _Texts = Field(min_length=1, examples=[_EXAMPLES])
    text_pairs: _Texts | None = Field(None, description="second texts, one for each text, for a model of pairs")


class Labelled(BaseModel):
    """A text with its label, as `indictune predict` writes it."""

    text: str
    text_pair: str | None = Field(None, description="the second text; absent if the model labels single texts")
    label: str | float | list[str] | None = Field(description="null for a text without words")
    scores: dict[str, float | None] | None = Field(None, description="of each label; absent for a regression")
    language: str | None


class LabelledTexts(BaseModel):
    """A label for each text, in their order."""

    predictions: list[Labelled]


class Observer:
    """Counts the answers for Prometheus, and logs a line for each. Neither holds texts, nor other words of clients."""

    def __init__(self, batches: Batches, has_log: bool) -> None:
        self._log = logging.Logger("access", logging.INFO if has_log else logging.CRITICAL)
        self._log.addHandler(handler := logging.StreamHandler())
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self.registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=self.registry)
        self.texts = prometheus.Counter("indictune_texts", "Labelled texts.", registry=self.registry)
        waiting = prometheus.Gauge("indictune_waiting_texts", "Texts that wait.", registry=self.registry)
        waiting.set_function(lambda: batches.waiting)
        what = ("indictune_request_seconds", "Time to an answer.", ["path", "status"])
        self._seconds = prometheus.Histogram(*what, registry=self.registry)

    def __call__(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"] if scope["path"] in _PATHS else "other"
        self._seconds.labels(path, status).observe(seconds)
        self._log.info("%s %s %d %.3f s", client_of(scope), path, status, seconds)


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


def create_app(classifier: Classifier, name: str, limits: RequestLimits, keys: Sequence[str] = ()) -> FastAPI:
    """The application. Its model is ready when this returns. `keys` are those that clients need, if there are any."""

    def labelled(texts: Sequence[Text]) -> list[dict[str, Any]]:
        return [rounded(row) for row in as_records(label(classifier, text_batch(texts)))]

    reading = classifier.served.reading
    labelled(_EXAMPLES if reading.text_pair_column is None else [_EXAMPLE])  # the first texts take longest
    labels = list(classifier.served.labels)
    batches = Batches(labelled, limits.max_batch_size, limits.max_waiting_texts)
    observer = Observer(batches, limits.access_log)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(batches.run())
        yield
        running.cancel()
        await asyncio.wait([running])

    about = _described(name, limits, reading)
    app = FastAPIOffline(title="indictune", version=__version__, description=about, lifespan=lifespan)
    app.add_middleware(Limits, limits=limits, keys=keys, observe=observer)
    _answer_errors(app)
    key = [Depends(HTTPBearer(auto_error=False))] if keys else []  # for /docs; `Limits` checks it

    @app.post("/predict", response_model=LabelledTexts, responses=_FAILURES, dependencies=key)
    async def predict(given: Texts, request: Request) -> JSONResponse:
        """Label texts."""
        found = await batches.label(_texts_of(given, reading, limits), client_of(request.scope))
        observer.texts.inc(len(found))
        return JSONResponse({"predictions": found})

    @app.get("/metrics", dependencies=key)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(prometheus.generate_latest(observer.registry), media_type=prometheus.CONTENT_TYPE_LATEST)

    @app.get("/health")
    async def health() -> ServerHealth:
        """Whether the server answers, and for which model."""
        return ServerHealth(status="ok", model=name, labels=labels, waiting_texts=batches.waiting)

    @app.get("/ready", responses={503: {"model": Failure}})
    async def ready() -> dict[str, str]:
        """Whether a request with as many texts as are allowed could wait for the model now."""
        if batches.waiting + limits.max_texts > limits.max_waiting_texts:
            raise RefusedError(503, problem("server-busy", value=batches.waiting, what="texts wait"))
        return {"status": "ready"}

    return app


_FAILURES: dict[int | str, dict[str, Any]] = {status: {"model": Failure} for status in (401, 408, 413, 422, 429, 503)}


def _described(name: str, limits: RequestLimits, reading: Reading) -> str:
    per_minute, are_pairs = limits.requests_per_minute, reading.text_pair_column is not None
    rate = f" A client may send {per_minute:,} requests a minute." if per_minute else ""
    return (
        f"Labels by {name}. A request has at most {limits.max_texts:,} texts of {limits.max_characters:,} characters "
        f"each, and {limits.max_request_bytes:,} bytes in all.{rate}"
        + (" The model labels pairs: `text_pairs` has a second text for each text." if are_pairs else "")
    )


def _texts_of(given: Texts, reading: Reading, limits: RequestLimits) -> Sequence[Text]:
    """The texts of a request, or its pairs; refuses what is too large, and texts of another kind than the model's."""
    for name, texts in (("texts", given.texts), ("text_pairs", given.text_pairs or [])):
        if len(texts) > limits.max_texts:
            raise RefusedError(413, problem("too-many-texts", value=len(texts), most=limits.max_texts))
        for number, text in enumerate(texts):
            if len(text) > limits.max_characters:
                place = f"{name}[{number}]"
                raise RefusedError(413, problem("text-too-long", place, len(text), most=limits.max_characters))
    if found := problems_of(check_pairs, reading, given.text_pairs is not None, "text_pairs"):
        raise RefusedError(422, found[0])
    if given.text_pairs is None:
        return given.texts
    if len(given.text_pairs) != len(given.texts):
        raise RefusedError(422, problem("pairs-uneven", "text_pairs", len(given.text_pairs), texts=len(given.texts)))
    return list(zip(given.texts, given.text_pairs, strict=True))


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
