"""Files and commands for several nodes: schemas know the fields, and each node starts torchrun with flags it has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from docs.generate import TRAINING
from indictune.config.recipe import read_recipe
from tests.ranks.launching import ROOT
from tests.ranks.pods import FOLDER, PODS, documents
from tests.test_docs import blocks, commands, of_repository

BLOCKS = blocks(ROOT / "docs/several_nodes.md")
SKYPILOT = ROOT / "scripts/skypilot/train.yaml"
ADDRESS, PORT, NODES = "10.0.0.7", "29500", 2
# In place of a launcher: it prints what it was given.
STAND_IN = '#!/bin/sh\nexec {python} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"\n'


def check(words: list[str], rank: int) -> None:
    """torchrun and the script have these flags, and this node is one of two."""
    given = get_args_parser().parse_args(words)
    assert (given.nnodes, given.nproc_per_node, int(given.node_rank)) == (str(NODES), "8", rank)
    assert (given.master_addr, str(given.master_port)) == (ADDRESS, PORT)
    recipe = read_recipe(of_repository(given.training_script_args), TRAINING[given.training_script])
    assert recipe.problems == []
    assert recipe.values["resume_from_checkpoint"] == "auto"


def started(shell: str, folder: Path, **variables: str) -> list[str]:
    """The words that a shell command gives to torchrun."""
    (folder / "torchrun").write_text(STAND_IN.format(python=sys.executable), encoding="utf-8")
    (folder / "torchrun").chmod(0o755)
    (folder / ".venv/bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv/bin/activate").touch()
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-ec", shell], cwd=folder, env=environment, capture_output=True, check=True)
    words: list[str] = json.loads(done.stdout)
    return words


@pytest.mark.parametrize("file", PODS)
def test_the_pods_of_kubernetes_start_torchrun_by_its_variables(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pods = PODS[file]()
    assert len(pods) == NODES
    for rank, pod in enumerate(pods):
        for name, value in pod.variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PET_MASTER_ADDR", ADDRESS)
        assert pod.command[0] == "torchrun"
        check(pod.command[1:], rank)


def pod_of(file: str) -> dict[str, Any]:
    """The pod that all nodes of a file have, which is described once."""
    spec = documents(file)[0]["spec"]
    if file == "pytorchjob.yaml":
        return dict(spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"])
    spec = spec["template"]["spec"] if file == "trainjob.yaml" else spec
    return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("file", [*PODS, "pytorchjob.yaml"])
def test_a_pod_has_time_to_save_and_memory_and_disks_to_share(file: str) -> None:
    pod = pod_of(file)
    (container,) = pod["containers"]
    trainer = documents(file)[-1]["spec"].get("trainer", container)
    (seconds,) = re.findall(r"--shutdown-timeout[= ](\d+)", " ".join([*trainer["command"], *trainer.get("args", [])]))
    assert int(seconds) < pod["terminationGracePeriodSeconds"]
    limits = trainer.get("resourcesPerNode", container.get("resources"))["limits"]
    assert limits == {"nvidia.com/gpu": 8}
    mounts = {each["name"]: Path(each["mountPath"]) for each in container["volumeMounts"]}
    volumes = {each.pop("name"): each for each in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert volumes[next(name for name in mounts if mounts[name] == Path("/dev/shm"))] == {
        "emptyDir": {"medium": "Memory"}
    }
    caches = [Path(each["value"]) for each in container["env"] if each["name"] in ("HF_HOME", "INDICTUNE_CACHE")]
    assert len(caches) == 2
    assert all(cache.is_relative_to(mounts["data"]) for cache in caches)


def changed_names(document: Any) -> Iterator[Any]:
    """A document, once with each of its fields misspelt. Names that the user chooses are left out."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name not in ("metadata", "limits"):
                yield {f"{each}x" if each == name else each: kept for each, kept in document.items()}
                yield from ({**document, name: changed} for changed in changed_names(value))
    elif isinstance(document, list):
        for place, value in enumerate(document):
            yield from ([*document[:place], changed, *document[place + 1 :]] for changed in changed_names(value))


def test_the_page_shows_a_part_of_a_file() -> None:
    shown = [block.content for block in BLOCKS if block.language == "yaml"]
    assert len(shown) == 1
    assert shown[0] in (FOLDER / "trainjob.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("file", PODS)
def test_the_published_schema_knows_every_field(file: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    of_kind = {
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "JobSet": models.JobsetV1alpha2JobSet,
    }
    for document in documents(file):
        assert document["apiVersion"] in ("trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2")
        model = of_kind[document["kind"]]
        assert model.from_dict(document).to_dict() == document  # it leaves out what it does not know
        misspelt = list(changed_names(document["spec"]))
        assert len(misspelt) > 5
        for spec in misspelt:
            wrong = {**document, "spec": spec}
            try:
                read = model.from_dict(wrong).to_dict()
            except ValueError:  # a field is missing that must be there
                continue
            assert read != wrong


def test_a_pytorchjob_has_two_equal_nodes_that_start_torchrun(tmp_path: Path) -> None:
    (job,) = documents("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"] == replicas["Worker"]
    assert sum(each["replicas"] for each in replicas.values()) == NODES
    (container,) = pod_of("pytorchjob.yaml")["containers"]
    assert container["name"] == "pytorch"  # the operator sets the variables of no other
    assert container["command"] == ["bash", "-c"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    for rank in range(NODES):
        check(started(container["args"][0], tmp_path, RANK=str(rank), MASTER_ADDR=ADDRESS, MASTER_PORT=PORT), rank)


def test_a_task_of_skypilot_starts_torchrun_on_two_nodes(tmp_path: Path) -> None:
    task: dict[str, Any] = yaml.safe_load(SKYPILOT.read_text(encoding="utf-8"))
    (mounted,) = task["file_mounts"].values()
    assert (mounted["mode"], PurePosixPath(mounted["source"]).parts) == ("MOUNT", ("s3:", "bucket"))  # no folder of it
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    variables["SKYPILOT_NODE_IPS"] = f"{ADDRESS}\n10.0.0.8"
    for rank in range(NODES):
        check(started(task["run"], tmp_path, SKYPILOT_NODE_RANK=str(rank), **variables), rank)


def test_skypilot_knows_every_field_of_its_task() -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    text = SKYPILOT.read_text(encoding="utf-8")
    assert sky.Task.from_yaml_config(yaml.safe_load(text)).num_nodes == NODES
    for field in ("num_nodes", "accelerators", "mode"):
        with pytest.raises(ValueError, match=r"Invalid .* YAML"):
            sky.Task.from_yaml_config(yaml.safe_load(text.replace(f"{field}:", f"{field}x:")))


def test_the_commands_have_flags_that_their_launchers_know() -> None:
    words = [each for block in BLOCKS if block.language == "bash" for each in commands(block.content)]
    by_launcher = {each[0]: each[1:] for each in words}
    assert by_launcher.keys() == {"sbatch", "torchrun", "accelerate", "deepspeed", "docker", "sky", "indictune"}
    assert (ROOT / by_launcher["sky"][1]).is_file()
    known = re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = (ROOT / "docs/several_nodes.md").read_text(encoding="utf-8")
    assert {*re.findall(r"--build-arg (\w+)=", page)} == {*known}
    run = get_args_parser().parse_args(by_launcher["torchrun"])
    assert (run.nnodes, run.training_script) == ("2", "scripts/train_sentiment.py")
    launched = launch_command_parser().parse_args(by_launcher["accelerate"][1:])
    assert (launched.num_machines, launched.num_processes) == (2, 16)
