"""The pods that Kubernetes starts for the files in scripts/kubernetes: the command and the variables of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.ranks.launching import ROOT

FOLDER = ROOT / "scripts/kubernetes"


class Pod(NamedTuple):
    """What a pod starts."""

    command: list[str]
    variables: dict[str, str]


def documents(file: str) -> list[dict[str, Any]]:
    """The documents of a file, such as `jobset.yaml`."""
    return list(yaml.safe_load_all((FOLDER / file).read_text(encoding="utf-8")))


def of_trainjob() -> list[Pod]:
    """What Kubeflow Trainer (2.3) makes of the TrainJob: the variables of its plugin for torch."""
    runtime, job = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert "torch" in runtime["spec"]["mlPolicy"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert (replicated["name"], container["name"]) == ("node", "node")  # Trainer knows no others
    trainer, name = job["spec"]["trainer"], job["metadata"]["name"]
    shared = {each["name"]: each["value"] for each in container["env"]}
    shared |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    shared |= {"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500"}
    return [Pod(trainer["command"], {**shared, "PET_NODE_RANK": str(rank)}) for rank in range(trainer["numNodes"])]


def of_jobset() -> list[Pod]:
    """What JobSet makes of its file. Each pod has its number in an annotation."""
    (jobset,) = documents("jobset.yaml")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completions"] == job["parallelism"]
    (container,) = job["template"]["spec"]["containers"]
    shared = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    (numbered,) = (each for each in container["env"] if "valueFrom" in each)
    field = numbered["valueFrom"]["fieldRef"]["fieldPath"]
    name = jobset["metadata"]["name"]
    assert shared["PET_MASTER_ADDR"] == f"{name}-{replicated['name']}-0-0.{name}"
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [Pod(container["command"], {**shared, numbered["name"]: str(rank)}) for rank in range(job["completions"])]


PODS = {"trainjob.yaml": of_trainjob, "jobset.yaml": of_jobset}


def small(pod: Pod, script: list[str], folder: Path) -> Pod:
    """The same pod with one process, another script and its flags, and its caches in a folder."""
    launcher = pod.command[: next(place for place, word in enumerate(pod.command) if word.startswith("scripts/"))]
    own = {"PET_NPROC_PER_NODE": "1", "HF_HOME": str(folder / "hub"), "INDICTUNE_CACHE": str(folder / "cache")}
    return Pod([*launcher, *script], {**pod.variables, **own})
