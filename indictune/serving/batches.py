"""Label the texts of concurrent requests in common batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Record = dict[str, Any]
_Waiting = tuple[str, "asyncio.Future[Record]"]


class QueueFullError(Exception):
    """The queue has no room for a request."""


class Batches:
    """A queue of texts in front of a model, which one thread runs.

    A batch takes what waits when the model becomes free. So nobody waits for a batch to fill up.

    Args:
        label: gives the record of each text.
        max_batch_size: texts of a batch.
        max_waiting: texts in the queue.
    """

    def __init__(self, label: Callable[[Sequence[str]], list[Record]], max_batch_size: int, max_waiting: int) -> None:
        self._label = label
        self._max_batch_size = max_batch_size
        self._max_waiting = max_waiting
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "model")

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return self._queue.qsize()

    async def label(self, texts: Sequence[str]) -> list[Record]:
        """The records of some texts, when `run` has come to them.

        Raises:
            QueueFullError: the queue is full.
            Exception: that the model raised for one of these texts.
        """
        if self.waiting + len(texts) > self._max_waiting:
            raise QueueFullError
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Record]] = [loop.create_future() for _ in texts]
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

    async def _answers(self, texts: Sequence[str]) -> list[Record | Exception]:
        """The records of a batch. If it fails, each text is tried alone: only the one at fault gets the error."""
        try:
            return [*await asyncio.get_running_loop().run_in_executor(self._thread, self._label, texts)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [answer for text in texts for answer in await self._answers([text])]
