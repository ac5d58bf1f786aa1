"""`--engine ray` on a real cluster of three nodes, with a store of objects that is a real server."""

from __future__ import annotations

import io
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.first_hour.saved_models import saved_classifier
from tests.ranks.launching import python, start, torchrun

pytestmark = pytest.mark.more
ROWS, SHARDS = 6_000, 12
PREDICT = [*python(), "-m", "indictune", "predict"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_classifier(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for number in range(SHARDS):
        ids = range(number * ROWS // SHARDS, (number + 1) * ROWS // SHARDS)
        texts = [f"{'अच्छी फिल्म' if row % 3 else 'bura movie'} {row}" for row in ids]
        pq.write_table(pa.table({"tweet": texts, "id": ids}), folder / f"tweets-{number:02d}.parquet")
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Iterator[Any]:
    """A bucket with the shards; processes that start later find it by their environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**names, "ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setenv(f"AWS_{name}", value)
        bucket = boto3.resource("s3").create_bucket(Bucket="tweets")
        for path in shards.iterdir():
            bucket.upload_file(str(path), f"in/{path.name}")
        yield bucket
    server.stop()


@pytest.fixture(scope="module")
def cluster(store: Any) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=100 << 20)
    made.wait_for_nodes()
    yield made
    made.shutdown()  # type: ignore[no-untyped-call]


def labels(content: list[bytes]) -> dict[int, Any]:
    """The rows of the labels by id, each of which is there once."""
    rows = [row for each in content for row in pq.read_table(io.BytesIO(each)).to_pylist()]
    found = {int(row["id"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def of_bucket(bucket: Any, prefix: str) -> list[bytes]:
    keys = [each.key for each in bucket.objects.filter(Prefix=prefix) if each.key.endswith(".parquet")]
    return [bucket.Object(key).get()["Body"].read() for key in sorted(keys)]


@pytest.fixture(scope="module")
def expected(model: Path, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By one process."""
    out = tmp_path_factory.mktemp("one") / "labels"
    command = [*PREDICT, str(model), "--input_file", f"{shards}/*.parquet", "--output_file", f"{out}/"]
    done = start([*command, "--keep_columns", "id"])
    assert done.returncode == 0, done.stderr
    manifest = json.loads((out / "_manifest.json").read_bytes())
    assert (manifest["rows"], len(manifest["done"])) == (ROWS, SHARDS)
    found = labels([path.read_bytes() for path in out.glob("*.parquet")])
    assert sorted(found) == list(range(ROWS))
    return found


def test_four_ranks_write_the_labels_of_one_process(
    model: Path, store: Any, expected: dict[int, Any], shards: Path, tmp_path: Path
) -> None:
    command = ["indictune/__main__.py", "predict", str(model), "--input_file", "s3://tweets/in/*.parquet"]
    done = start([*torchrun(4), *command, "--output_file", "s3://tweets/ranks/", "--keep_columns", "id"])
    assert done.returncode == 0, done.stderr
    assert labels(of_bucket(store, "ranks/")) == expected


def test_ray_writes_the_same_though_a_node_is_killed(
    model: Path, store: Any, cluster: Any, expected: dict[int, Any]
) -> None:
    flags = ["--input_file", "s3://tweets/in/*.parquet", "--output_file", "s3://tweets/ray/", "--keep_columns", "id"]
    command = [*PREDICT, str(model), *flags, "--engine", "ray", "--ray_address", cluster.address]
    command += ["--bad_rows", "quarantine"]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not of_bucket(store, "ray/") and driver.poll() is None:
        time.sleep(0.1)
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    _, said = driver.communicate(timeout=240)
    assert driver.returncode == 0, said
    assert labels(of_bucket(store, "ray/")) == expected
    manifest = json.loads(store.Object("ray/_manifest.json").get()["Body"].read())
    assert (manifest["rows"], len(manifest["done"])) == (ROWS, SHARDS)


def test_ray_prepares_the_rows_of_one_process(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{'अच्छी फिल्म' if row % 3 else 'bura #movie'} {row},{row % 2}\n" for row in range(45_000))
    (tmp_path / "train.csv").write_text(f"text,label\n{rows}", encoding="utf-8")
    model = ["--model_name_or_path", "builtin:tiny-indic-bert", "--output_dir", str(tmp_path / "run")]
    command = [*python(), "-m", "indictune", "prepare", "--train_file", str(tmp_path / "train.csv"), *model]
    found = []
    for name, flags in {"one": [], "ray": ["--engine", "ray", "--ray_address", cluster.address]}.items():
        monkeypatch.setenv("INDICTUNE_CACHE", str(tmp_path / name))
        done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        folders = (tmp_path / name / "prepared").glob("*/digests.json")
        found.append({path.parent.name: json.loads(path.read_bytes()) for path in folders})
    assert len(found[0]) >= 2
    assert found[0] == found[1]
