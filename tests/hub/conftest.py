"""A Hub that this process asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from huggingface_hub import constants, set_client_factory
from huggingface_hub.hf_api import api
from huggingface_hub.utils._http import default_client_factory

from tests.faults.hub import Hub, hub

TOKEN = "hf_CanaryCanaryCanaryCanaryCanary1234"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process asks; nobody sleeps, and large files go by LFS."""
    with hub() as kept:
        kept.large = ".safetensors"
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", kept.url)
        monkeypatch.setattr(api, "endpoint", kept.url)
        yield kept
        set_client_factory(default_client_factory)
