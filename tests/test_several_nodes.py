"""What docs/several_nodes.md gives to launchers: the files parse, and each node starts torchrun with flags it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from docs.generate import TRAINING
from indictune.config.recipe import read_recipe
from tests.ranks.launching import ROOT
from tests.test_docs import blocks, commands, of_repository

BLOCKS = blocks(ROOT / "docs/several_nodes.md")
YAML = [block.content for block in BLOCKS if block.language == "yaml"]
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


def test_a_pytorchjob_has_two_equal_nodes_that_start_torchrun(tmp_path: Path) -> None:
    job: dict[str, Any] = yaml.safe_load(YAML[0])
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"] == replicas["Worker"]
    assert sum(each["replicas"] for each in replicas.values()) == NODES
    pod = replicas["Master"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator sets the variables of no other
    assert container["command"] == ["bash", "-c"]
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["nprocPerNode"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    for rank in range(NODES):
        check(started(container["args"][0], tmp_path, RANK=str(rank), MASTER_ADDR=ADDRESS, MASTER_PORT=PORT), rank)


def test_a_task_of_skypilot_starts_torchrun_on_two_nodes(tmp_path: Path) -> None:
    task: dict[str, Any] = yaml.safe_load(YAML[1])
    gpus = task["resources"]["accelerators"].partition(":")[2]
    variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": gpus}
    variables["SKYPILOT_NODE_IPS"] = f"{ADDRESS}\n10.0.0.8"
    for rank in range(NODES):
        check(started(task["run"], tmp_path, SKYPILOT_NODE_RANK=str(rank), **variables), rank)


def test_the_commands_have_flags_that_their_launchers_know() -> None:
    words = [each for block in BLOCKS if block.language == "bash" for each in commands(block.content)]
    by_launcher = {each[0]: each[1:] for each in words}
    assert by_launcher.keys() == {"sbatch", "torchrun", "accelerate", "deepspeed", "indictune"}
    run = get_args_parser().parse_args(by_launcher["torchrun"])
    assert (run.nnodes, run.training_script) == ("2", "scripts/train_sentiment.py")
    launched = launch_command_parser().parse_args(by_launcher["accelerate"][1:])
    assert (launched.num_machines, launched.num_processes) == (2, 16)
