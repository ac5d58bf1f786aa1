"""Latency and texts a second of `indictune serve` under load.

    python -m benchmarks.serve

Clients send requests of one text, each the next one when its answer is there. One client sends its requests one by
one. Others share the server's batches, or get a batch each with `--max_batch_size 1`. Texts are random words of the
built-in tweets in the lengths of real ones, and models are BERTs with random heads (benchmarks/predict.py). The server
has one thread on the CPU, and the clients share one process. Two idle cores take three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from transformers import AutoTokenizer

from benchmarks.environment import environment, write_results
from benchmarks.predict import MODELS, save_model, texts
from indictune.console_text import table

# Connections and --max_batch_size.
LOADS = ((1, 64), (8, 64), (64, 64), (200, 64), (64, 1))
TEXTS = 500
_WARM_UP_S = 1.0


@contextmanager
def serving(model: Path, max_batch_size: int) -> Iterator[str]:
    """The address of a server without a limit on the rate, while it runs."""
    words = ["serve", str(model), "--port", "0", "--requests_per_minute", "0", "--access_log", "false"]
    command = [sys.executable, "-m", "indictune", *words, "--max_batch_size", str(max_batch_size)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=one_thread, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            line = server.stdout.readline()  # "Serving NAME on http://127.0.0.1:PORT. ..."
            yield line.partition(" on ")[2].partition(". ")[0]
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
    if server.returncode != 0:
        raise RuntimeError(f"the server ended with code {server.returncode}")


async def load(url: str, rows: list[str], connections: int, seconds: float) -> list[float]:
    """The latency of each request that clients send within some seconds, in seconds.

    Raises:
        RuntimeError: a request was not answered.
    """
    found: list[float] = []
    limits = httpx2.Limits(max_connections=connections, max_keepalive_connections=connections)
    async with httpx2.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
        began = time.perf_counter()

        async def send(number: int) -> None:
            while (sent := time.perf_counter()) < began + _WARM_UP_S + seconds:
                text = rows[number % len(rows)]
                answer = await client.post("/predict", json={"texts": [text]})
                if answer.status_code != 200 or answer.json()["predictions"][0]["text"] != text:
                    raise RuntimeError(f"{answer.status_code}: {answer.text[:200]}")
                if sent >= began + _WARM_UP_S:
                    found.append(time.perf_counter() - sent)
                number += connections

        await asyncio.gather(*map(send, range(connections)))
    return found


def measure(folder: Path, name: str, seconds: float) -> list[dict[str, Any]]:
    """A row for each load on a model."""
    size, _ = MODELS[name]
    save_model(folder, size)
    rows = texts(TEXTS, AutoTokenizer.from_pretrained(folder))
    found = []
    for connections, max_batch_size in LOADS:
        with serving(folder, max_batch_size) as url:
            latencies = asyncio.run(load(url, rows, connections, seconds))
        p50, p99 = (float(each) * 1000 for each in np.percentile(latencies, [50, 99]))
        row = {"connections": connections, "max_batch_size": max_batch_size, "requests": len(latencies), "lost": 0}
        rate = {"texts_per_second": round(len(latencies) / seconds, 1)}
        found.append(row | rate | {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)})
        print(name, found[-1], file=sys.stderr)
    return found


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["2 layers x 128", "6 layers x 384"])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    asked = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "seconds": asked.seconds, "models": {}}
    body = []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            results["models"][name] = found = measure(Path(folder), name, asked.seconds)
        body += [[name, *(f"{value:,}" for value in row.values())] for row in found]
    print(table(["model", "connections", "batch", "requests", "lost", "texts/s", "p50 ms", "p99 ms"], body))
    print(write_results("serve", results))


if __name__ == "__main__":
    main()
