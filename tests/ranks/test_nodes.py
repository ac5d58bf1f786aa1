"""Runs on several nodes, which have their own network, address and host name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ranks.launching import BIN, ROOT, SCRIPT, Run, distance
from tests.ranks.nodes import FIRST, VARIABLES, Ended, on_nodes
from tests.ranks.pods import PODS, Pod, small
from tests.ranks.test_parity import PLAIN, differences

Start = Callable[..., Run]
NODES = ("node0", "node1")
MEETING = ["--master_addr", FIRST, "--master_port", "29500"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{FIRST}:29500", "--rdzv-id", "job"]


def torchrun(node: int, *flags: str, ranks: int = 1) -> list[str]:
    sizes = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--node-rank", str(node)]
    return [str(BIN / "torchrun"), *sizes, *flags]


def accelerate(node: int, strategy: str) -> list[str]:
    return [
        *(str(BIN / "accelerate"), "launch", "--config_file", f"accelerate_configs/{strategy}.yaml"),
        *("--num_machines", "2", "--machine_rank", str(node), "--num_processes", "2"),
        *("--main_process_ip", FIRST, "--main_process_port", "29500"),
    ]


LAUNCHERS: dict[str, Callable[[int], list[str]]] = {
    "torchrun": lambda node: torchrun(node, *MEETING),
    "torchrun c10d": lambda node: torchrun(node, *RENDEZVOUS),
    "accelerate ddp": lambda node: accelerate(node, "ddp"),
    "accelerate fsdp2": lambda node: accelerate(node, "fsdp2"),
    "accelerate zero2": lambda node: accelerate(node, "zero2"),
}


def of_same_run(run_under: Start, out: Path, ended: list[Ended]) -> bool:
    """Whether the run of two ranks ended well, with the losses and weights of one process."""
    assert [each.code for each in ended] == [0] * len(ended), ended
    run = Run(out)
    assert run.metrics["world_size"] == 2
    return differences(run_under("single", 1, *PLAIN), run) == []


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(name, marks=pytest.mark.more if name == "accelerate fsdp2" else pytest.mark.slow)
        for name in LAUNCHERS
    ],
)
def test_two_nodes_give_the_run_of_one_process(run_under: Start, job: Path, tmp_path: Path, launcher: str) -> None:
    out = tmp_path / "out"
    train = [SCRIPT, "--config", str(job), "--output_dir", str(out)]
    ended = on_nodes(tmp_path / "nodes", [[*LAUNCHERS[launcher](node), *train] for node in range(2)])
    assert of_same_run(run_under, out, ended)


@pytest.mark.parametrize(
    "file",
    [pytest.param("trainjob.yaml", marks=pytest.mark.more), pytest.param("jobset.yaml", marks=pytest.mark.slow)],
)
def test_the_pods_of_kubernetes_give_the_run_of_one_process(
    run_under: Start, job: Path, tmp_path: Path, file: str
) -> None:
    out = tmp_path / "out"
    train = [SCRIPT, "--config", str(job), "--output_dir", str(out)]
    pods = [small(pod, train, tmp_path) for pod in PODS[file]()]
    variables = {rank: pod.variables for rank, pod in enumerate(pods)}
    ended = on_nodes(tmp_path / "nodes", [pod.command for pod in pods], variables)
    assert of_same_run(run_under, out, ended)


# Kubernetes removes the second pod after the first step. Then it starts both again.
EVICTED = """
{command} & started=$!
if [ $PET_NODE_RANK = 1 ]; then
    until [ -s {out}/train_log.jsonl ]; do sleep 0.2; done
    kill -TERM $started
fi
wait $started; echo "first attempt: $?, $(cat {out}/status.json)"
{command}; echo "second attempt: $?"
"""


@pytest.mark.slow
def test_pods_that_are_evicted_save_and_resume(run_under: Start, job: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--config", str(job), "--output_dir", str(out), "--resume_from_checkpoint=auto"]
    train = ["tests/ranks/paced.py", "1", str(tmp_path / "rows.jsonl"), SCRIPT, *flags]
    pods: list[Pod] = [small(pod, train, tmp_path) for pod in PODS["jobset.yaml"]()]
    commands = [["bash", "-c", EVICTED.format(command=" ".join(pod.command), out=out)] for pod in pods]
    ended = on_nodes(tmp_path / "nodes", commands, {rank: pod.variables for rank, pod in enumerate(pods)})
    for each in ended:
        assert 'first attempt: 1, {"state": "resumable"' in " ".join(each.said.split()).replace("{ ", "{"), each.said
        assert "second attempt: 0" in each.said
    assert "Resuming from " in ended[0].said
    assert of_same_run(run_under, out, ended)


@pytest.mark.slow
def test_deepspeed_starts_the_nodes_of_a_hostfile(run_under: Start, job: Path, tmp_path: Path) -> None:
    """By pdsh and ssh, which bring no variable to another node but those of `.deepspeed_env`."""
    out, hostfile, home = tmp_path / "out", tmp_path / "hostfile", tmp_path / "home"
    hostfile.write_text("node0 slots=1\nnode1 slots=1\n", encoding="utf-8")
    home.mkdir()
    carried = {**VARIABLES, "INDICTUNE_CACHE": os.environ["INDICTUNE_CACHE"]}
    lines = "".join(f"{name}={value}\n" for name, value in carried.items())
    (home / ".deepspeed_env").write_text(lines, encoding="utf-8")
    (home / ".cache").symlink_to(Path.home() / ".cache")  # with what DeepSpeed has compiled
    launcher = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), "--master_addr", FIRST]
    train = [SCRIPT, "--deepspeed", "ds_configs/zero2.json", "--config", str(job), "--output_dir", str(out)]
    (ended,) = on_nodes(tmp_path / "nodes", [[*launcher, *train]], {0: {"HOME": str(home)}})
    assert of_same_run(run_under, out, [ended])
    assert Run(out).metrics["strategy"] == "zero2"


# What SLURM's commands do on two nodes. srun takes the environment along.
SRUN = """#!/bin/bash
while [ "${{1#--}}" != "$1" ]; do shift; done
for node in 0 1; do
    SLURM_NODEID=$node nsenter --target "$(cat {nodes}/node$node)" --net --uts "$@" & waited+=($!)
done
for each in "${{waited[@]}}"; do wait "$each" || worst=$?; done
exit "${{worst:-0}}"
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") echo node0; echo node1 ;;
    "show job") echo "   Requeue=1" ;;
    *) echo "$@" >> {calls} ;;
esac
"""
# The time is nearly over after the first step. Queued again, the job trains to its end.
TWO_ATTEMPTS = """
export PATH={tools}:$PATH
{job} & started=$!
until [ -s {out}/train_log.jsonl ]; do sleep 0.2; done
kill -USR1 $started
wait $started; echo "first attempt: $?, $(cat {out}/status.json)"
{job}; echo "second attempt: $?"
"""


@pytest.mark.slow
def test_slurm_queues_two_nodes_again_and_they_resume(run_under: Start, job: Path, tmp_path: Path) -> None:
    out, tools, calls = tmp_path / "out", tmp_path / "tools", tmp_path / "calls"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text.format(nodes=tmp_path / "nodes", calls=calls), encoding="utf-8")
        (tools / name).chmod(0o755)
    slow_steps = f"tests/ranks/paced.py 1 {tmp_path / 'rows.jsonl'} {SCRIPT}"
    script = f"bash scripts/slurm/train.sbatch accelerate_configs/ddp.yaml {slow_steps}"
    attempts = TWO_ATTEMPTS.format(job=f"{script} --config {job} --output_dir {out}", out=out, tools=tools)
    of_job = {"SLURM_JOB_ID": "77", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "PROCESSES_PER_NODE": "1"}
    (ended,) = on_nodes(tmp_path / "nodes", [["bash", "-c", attempts]], {0: of_job})
    assert 'first attempt: 0, {"state": "resumable"' in " ".join(ended.said.split()).replace("{ ", "{"), ended.said
    assert calls.read_text(encoding="utf-8") == "requeue 77\n"
    assert "Resuming from " in ended.said
    assert "second attempt: 0" in ended.said
    assert of_same_run(run_under, out, [ended])


def started_apart(tmp_path: Path, recipes: list[Path], variables: dict[int, dict[str, str]]) -> list[Ended]:
    """A run of nodes whose disks are apart. No node trains."""
    outs = [tmp_path / f"out{node}" for node in range(2)]
    commands = [
        [*torchrun(node, *MEETING), SCRIPT, "--config", str(recipes[node]), "--output_dir", str(outs[node])]
        for node in range(2)
    ]
    caches = {node: {"INDICTUNE_CACHE": str(tmp_path / f"cache{node}")} for node in range(2)}
    given = {node: caches[node] | variables.get(node, {}) for node in range(2)}
    ended = on_nodes(tmp_path / "nodes", commands, given)
    assert all(each.code != 0 for each in ended), ended
    for out in outs:
        assert json.loads((out / "status.json").read_text(encoding="utf-8"))["state"] == "user_error"
        assert not (out / "train_log.jsonl").exists()
    return ended


@pytest.mark.slow
def test_a_node_with_other_code_packages_or_flags_is_named_before_a_row_is_read(job: Path, tmp_path: Path) -> None:
    site, recipe = tmp_path / "site", tmp_path / "other.yaml"
    shutil.copytree(ROOT / "indictune", site / "indictune", ignore=shutil.ignore_patterns("__pycache__"))
    with (site / "indictune" / "versions.py").open("a", encoding="utf-8") as code:
        code.write("# another commit\n")
    (site / "trl-9.9.dist-info").mkdir()
    (site / "trl-9.9.dist-info" / "METADATA").write_text("Name: trl\nVersion: 9.9\n", encoding="utf-8")
    recipe.write_text(f"{job.read_text(encoding='utf-8')}weight_decay: 0.5\n", encoding="utf-8")
    ended = started_apart(tmp_path, [job, recipe], {1: {"PYTHONPATH": str(site)}})
    for each in ended:
        assert "version of trl of rank 1 on node1: 9.9. Rank 0 on node0 has " in each.said
        assert "--weight_decay of rank 1 on node1: 0.5. Rank 0 on node0 has " in each.said
        assert "version of indictune of rank 1 on node1: " in each.said
    assert list((tmp_path / "cache0").rglob("tokens-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("second", ["other", "missing"])
def test_a_node_with_other_rows_is_named_before_a_model_is_loaded(job: Path, tmp_path: Path, second: str) -> None:
    recipe, rows = tmp_path / "other.yaml", tmp_path / "rows.jsonl"
    first = next(line for line in job.read_text(encoding="utf-8").splitlines() if line.startswith("train_file"))
    lines = Path(json.loads(first.partition(": ")[2])).read_text(encoding="utf-8").splitlines(keepends=True)
    if second == "other":
        rows.write_text("".join(lines[:-1]), encoding="utf-8")
    other = job.read_text(encoding="utf-8").replace(first, f"train_file: {json.dumps(str(rows))}")
    recipe.write_text(other, encoding="utf-8")
    ended = started_apart(tmp_path, [job, recipe], {})
    if second == "other":
        expected = "train rows of rank 1 on node1: 100, digest "
    else:
        expected = f"rank 1 on node1 cannot run: --train_file {rows}: "
    assert expected in ended[0].said


@pytest.mark.slow
@pytest.mark.parametrize("disks", ["shared", "without locks", "separate"])
def test_rows_are_prepared_once_a_node_at_most(job: Path, tmp_path: Path, disks: str) -> None:
    notes, outs = tmp_path / "notes", [tmp_path / f"out{node if disks == 'separate' else ''}" for node in range(2)]
    flags = ["--config", str(job), "--max_steps", "1", "--save_strategy", "no"]
    commands, variables = [], {}
    for node in range(2):
        launcher = torchrun(node, *MEETING, ranks=2)
        train = ["tests/ranks/counting.py", str(notes), SCRIPT, *flags, "--output_dir", str(outs[node])]
        commands.append([*launcher, *train])
        cache, temporary = tmp_path / f"cache{node if disks == 'separate' else ''}", tmp_path / f"tmp{node}"
        temporary.mkdir()
        variables[node] = {"INDICTUNE_CACHE": str(cache), "TMPDIR": str(temporary)}
        variables[node] |= {"NO_LOCKS": str(cache)} if disks == "without locks" else {}
    ended = on_nodes(tmp_path / "nodes", commands, variables)
    assert [each.code for each in ended] == [0, 0], ended
    made = [tuple(line.split()) for line in notes.read_text(encoding="utf-8").splitlines()]
    first, second = (Run(out).weights for out in outs)
    assert distance(first, second) == 0.0
    for kind in ("rows", "tokens"):
        by = [node for name, node in made if name == kind]
        assert len(by) == len(set(by)) > 0
        assert set(by) <= set(NODES)
        assert {"shared": len(by) == 1, "separate": len(by) == 2}.get(disks, True)
