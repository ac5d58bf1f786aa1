"""The GPUs that a plan and the doctor know."""

from __future__ import annotations

import pytest

from indictune.config.shared_arguments import MachineArguments
from indictune.errors import UserError
from indictune.planning.hardware import gpu_of_device, known_gpus, known_links, machine_of, machine_of_flags
from indictune.planning.step_time import flops_of_gpu
from tests.plans import plan_of


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Quadro P2000", None),
    ],
)
def test_a_device_has_the_figures_of_its_own_data_sheet(device: str, name: str | None) -> None:
    assert gpu_of_device(device) == name


@pytest.mark.parametrize(
    ("given", "flops"), [({"bf16": True}, 312e12), ({"bf16": False}, 19.5e12), ({"bf16": False, "tf32": True}, 156e12)]
)
def test_a_gpu_is_as_fast_as_its_data_sheet_says_of_the_type(given: dict[str, bool], flops: float) -> None:
    plan = plan_of({}).derive(**given)
    assert flops_of_gpu(plan, machine_of("a100", 1)) == flops


def test_every_gpu_has_a_known_link() -> None:
    assert {str(each["link"]) for each in known_gpus().values()} <= known_links().keys()


@pytest.mark.parametrize(("gpu", "link"), [("mi300x", 64e9), ("h100", 64e9), ("a100", 32e9), ("a10", 32e9)])
def test_pcie_is_that_of_the_gpu(gpu: str, link: float) -> None:
    assert machine_of_flags(MachineArguments(gpus=8, gpu=gpu, interconnect="pcie")).in_node == link


def test_a_gpu_is_known_in_capitals_too() -> None:
    assert machine_of_flags(MachineArguments(gpu="H100")) == machine_of("h100", 1)


def test_only_nvidia_has_nvlink() -> None:
    with pytest.raises(UserError, match="plan-interconnect"):
        machine_of_flags(MachineArguments(gpus=8, gpu="mi300x", interconnect="nvlink"))
