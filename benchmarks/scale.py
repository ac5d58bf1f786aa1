"""Rows a second where data are many: preparation by cores and against an earlier commit, labels by ranks and nodes.

    python -m benchmarks.scale preparation [--rows 2000000] [--before 907b82d7]
    python -m benchmarks.scale labels [--rows 200000]

`preparation` reads, cleans and checks random tweets without a language column (benchmarks/preparation.py) with the
code of an earlier commit, with this code on one core and on two, and then tokenises them next to plain
`Dataset.map`. Each stage runs in its own process, from an empty cache. Memory is the largest sum over its processes
of what is theirs alone: without files that are mapped, which the system takes back when it needs memory.

`labels` writes 64 shards of parquet, and labels them with the built-in encoder: by one process, by four ranks, by Ray
on one, two and three nodes of one core each, and by Ray with a node killed. It compares all labels, sorted by row.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.environment import environment, write_results
from benchmarks.predict import save_model, texts
from benchmarks.preparation import write_rows, write_tokenizer
from indictune.console_text import table
from indictune.models.builtin import Size

ROOT = Path(__file__).parents[1]
WORK = {
    "read": "load_splits(DataArguments(train_file=rows))",
    "both": "tokenise_splits((s := load_splits(DataArguments(train_file=rows))), tokenizer, s.labels, 128)",
}
TOKENISE = "from indictune.data.text.tokenisation import tokenise_splits"
OURS = """
import sys, time
from indictune.config.arguments import DataArguments
from indictune.data.load_rows import load_splits
{more}
from transformers import AutoTokenizer
rows, tokenizer = sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[2])
began = time.perf_counter()
{work}
print(time.perf_counter() - began)
"""
PLAIN = """
import sys, time
from benchmarks.preparation import _run_plain
from transformers import AutoTokenizer
print(_run_plain("plain_map", sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[2]), sys.argv[3]))
"""
LOOK_EVERY_S = 0.25
SHARDS = 64


def memory_of(process: psutil.Process) -> int:
    """Bytes of a process and its children, without mapped files (Linux)."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
            total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return total


def measured(command: Sequence[str], cwd: Path, cores: Sequence[int], **variables: str) -> dict[str, float]:
    """Run a command on some cores: the seconds that it prints last, and the most memory of its processes in bytes."""
    names = {"PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    environ = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"} | names
    process = psutil.Popen(command, cwd=cwd, env=environ, stdout=subprocess.PIPE, text=True)
    process.cpu_affinity(list(cores))
    most = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            most = max(most, memory_of(process))
        time.sleep(LOOK_EVERY_S)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{command[:3]} ended with code {process.returncode}")
    return {"seconds": float(said.splitlines()[-1]), "peak_bytes": most}


def preparation(rows: int, before: str) -> dict[str, Any]:
    """Each stage of the preparation, and the tables of them."""
    found: dict[str, Any] = {}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as work:
        file, tokenizer, old = Path(work, "rows.csv"), Path(work, "tokenizer"), Path(work, "before")
        write_rows(file, rows)
        write_tokenizer(tokenizer, 30_000)
        old.mkdir()
        archive = subprocess.run(["git", "archive", before, "indictune"], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(old)], input=archive.stdout, check=True)
        stages: dict[str, tuple[str, Path, list[int]]] = {
            f"read, clean, check: {before}": (OURS.format(more="", work=WORK["read"]), old, cores),
            "read, clean, check": (OURS.format(more="", work=WORK["read"]), ROOT, cores),
            "read, clean, check: one core": (OURS.format(more="", work=WORK["read"]), ROOT, cores[:1]),
            "read, clean, check, tokenise": (OURS.format(more=TOKENISE, work=WORK["both"]), ROOT, cores),
            "Dataset.map, which tokenises": (PLAIN, ROOT, cores),
        }
        for number, (name, (code, cwd, of)) in enumerate(stages.items()):
            cache = {"INDICTUNE_CACHE": f"{work}/cache-{number}", "HF_DATASETS_CACHE": f"{work}/plain"}
            command = [sys.executable, "-c", code, str(file), str(tokenizer), f"{work}/plain"]
            found[name] = measured(command, cwd, of, **cache)
            found[name] |= {"rows_per_second": round(rows / found[name]["seconds"]), "cores": len(of)}
            print(f"{name}: {found[name]}", flush=True)
    body = [
        [
            name,
            str(each["cores"]),
            f"{each['seconds']:.1f}",
            f"{each['rows_per_second']:,}",
            f"{each['peak_bytes'] / 1e6:,.0f}",
        ]
        for name, each in found.items()
    ]
    print(table([f"{rows:,} rows", "cores", "seconds", "rows/s", "MB"], body))
    return found


def write_shards(folder: Path, rows: int, draw: Callable[[int], list[str]]) -> None:
    """Write 64 shards of texts and their numbers."""
    folder.mkdir()
    some = draw(min(rows, 20_000))
    for shard in range(SHARDS):
        ids = range(shard * rows // SHARDS, (shard + 1) * rows // SHARDS)
        content = {"text": [f"{some[row % len(some)]} {row}" for row in ids], "id": [*ids]}
        pq.write_table(pa.table(content), folder / f"tweets-{shard:02d}.parquet")


def digest_of(folder: Path) -> str:
    """SHA-256 of all labels and scores, sorted by row."""
    found = pa.concat_tables([pq.read_table(path) for path in folder.glob("*.parquet")])
    order = found.append_column("row", found["id"].cast(pa.int64())).sort_by("row").combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, order.schema) as writer:
        writer.write_table(order)
    return hashlib.sha256(sink.getvalue()).hexdigest()


def labels(rows: int) -> dict[str, Any]:
    """Rows a second of each way to label the shards, and whether all labels are equal."""
    from ray.cluster_utils import Cluster
    from transformers import AutoTokenizer

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as work:
        model, shards = Path(work, "model"), Path(work, "in")
        save_model(model, Size())
        tokenizer = AutoTokenizer.from_pretrained(model)
        write_shards(shards, rows, lambda number: texts(number, tokenizer))
        flags = ["--input_file", f"{shards}/*.parquet", "--keep_columns", "id"]
        label = ["-m", "indictune", "predict", str(model), *flags]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--master_port", "29577", "--nproc_per_node"]
        ways: dict[str, tuple[list[str], int]] = {
            "one process": ([sys.executable, *label], 0),
            "two ranks": ([*torchrun, "2", *label], 0),
            "four ranks": ([*torchrun, "4", *label], 0),
            "Ray, one node": ([sys.executable, *label, "--engine", "ray"], 1),
            "Ray, two nodes": ([sys.executable, *label, "--engine", "ray"], 2),
            "Ray, three nodes": ([sys.executable, *label, "--engine", "ray"], 3),
            "Ray, three nodes, one killed": ([sys.executable, *label, "--engine", "ray"], 3),
        }
        for name, (command, nodes) in ways.items():
            cluster, out = None, Path(work, name.replace(" ", "-").replace(",", ""))
            if nodes:
                node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 200 << 20}
                cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
                for _ in range(nodes - 1):
                    cluster.add_node(**node)
                command = [*command, "--ray_address", cluster.address]
            began = time.perf_counter()
            process = subprocess.Popen([*command, "--output_file", f"{out}/"], stderr=subprocess.PIPE, text=True)
            if name.endswith("killed") and cluster is not None:
                while len(list(out.glob("*.parquet"))) < SHARDS // 4 and process.poll() is None:
                    time.sleep(0.2)
                cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
            _, said = process.communicate()
            seconds = time.perf_counter() - began
            if cluster is not None:
                cluster.shutdown()  # type: ignore[no-untyped-call]
            if process.returncode:
                raise RuntimeError(said)
            found[name] = {"seconds": seconds, "rows_per_second": rows / seconds, "digest": digest_of(out)}
            print(f"{name}: {seconds:.1f} s, {rows / seconds:,.0f} rows/s, {found[name]['digest'][:12]}", flush=True)
    equal = len({each["digest"] for each in found.values()}) == 1
    body = [[name, f"{each['seconds']:.0f}", f"{each['rows_per_second']:,.0f}"] for name, each in found.items()]
    print(table([f"{rows:,} rows in {SHARDS} shards", "seconds with start", "rows/s"], body))
    print("all labels are equal" if equal else "labels DIFFER")
    return {"ways": found, "all_equal": equal}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("preparation", "labels"))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--before", default="907b82d7")
    parser.add_argument("--name", help="of the result file; none writes no file")
    args = parser.parse_args()
    rows = args.rows or {"preparation": 2_000_000, "labels": 200_000}[args.part]
    found = preparation(rows, args.before) if args.part == "preparation" else labels(rows)
    name = args.name or f"scale-{args.part}"
    if name != "none":
        print(write_results(name, {"environment": environment(), "rows": rows, "before": args.before, **found}))


if __name__ == "__main__":
    main()
