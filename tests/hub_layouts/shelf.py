"""Repositories that a Hub on this machine gives: their commits and references, as huggingface_hub 2.4 asks for them.

Facts of the protocol are from the sources of huggingface_hub, datasets and transformers, which read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from hashlib import sha1, sha256
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE_BYTES = 2_000  # larger files are redirected to a store, as large files of the Hub are
PAGE = 50  # entries of a listing
CONVERTED = "refs/convert/parquet"
Kind = Literal["models", "datasets"]
Files = Mapping[str, bytes]
Headers = Message


@dataclass(frozen=True)
class Answer:
    """Of a request: a status, headers, and a body."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass
class Repository:
    """What one name of the Hub stands for.

    Attributes:
        name: OWNER/NAME, or NAME alone as of the oldest ones.
        commits: the files of each, by its hash.
        refs: the commit of each reference, such as `main`, `refs/pr/1` and `refs/convert/parquet`.
        gated: files need a token that has been let in; listings do not.
        moved_to: the name that it has now.
    """

    name: str
    kind: Kind
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    moved_to: str | None = None

    def commit(self, files: Files, ref: str = "main") -> str:
        """Make a commit of these files the newest of a reference, and return its hash."""
        text = json.dumps([self.name, ref, len(self.commits), {name: sha1(files[name]).hexdigest() for name in files}])
        made = sha1(text.encode()).hexdigest()
        self.commits[made], self.refs[ref] = files, made
        return made

    def found(self, revision: str) -> str | None:
        """The commit of a revision."""
        return self.refs.get(revision) or (revision if revision in self.commits else None)


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of a folder, by relative names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_files(folder: Path, files: Files) -> Path:
    """Write files, given by relative names, into a folder, and return it."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@dataclass
class Shelf:
    """All repositories of a Hub.

    Attributes:
        url: of the Hub.
        let_in: tokens that gated repositories let in.
        asked: the paths of all requests, as they came.
    """

    repositories: list[Repository] = field(default_factory=list)
    url: str = ""
    let_in: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def add(self, name: str, files: Files, kind: Kind = "models", **settings: Any) -> Repository:
        """A repository with one commit on `main`."""
        made = Repository(name, kind, **settings)
        made.commit(files)
        self.repositories.append(made)
        return made

    def answer(self, target: str, body: bytes, headers: Headers) -> Answer | None:
        """Of a request for one of its repositories; None where it is for none of them."""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.asked.append(unquote(path))
        if path.startswith("/store/"):
            return self._stored(path.removeprefix("/store/"), headers)
        if raw := re.match(r"/raw/([^/]+/[^/]+)/([^/]+)/(.+)", path):  # as GitHub gives files
            found_here = next(each for each in self.repositories if each.name == raw[1])
            return self._file(found_here, found_here.found(raw[2]) or "", unquote(raw[3]), headers)
        api = re.match(r"/api/(models|datasets)/(.+)", path)
        found = api or re.match(r"/(?:(datasets)/)?(.+)", path)
        kind, rest = (found[1] or "models", found[2]) if found else ("models", "")
        for each in self.repositories:
            if each.kind == kind and (rest + "/").startswith(each.name + "/"):
                return self._of(
                    each, bool(api), target, rest.removeprefix(each.name).lstrip("/"), query, body, headers
                )
        is_read = not body and (re.fullmatch(r"/api/(models|datasets)/[^/]+(/[^/]+)?", path) or "/resolve/" in path)
        return _error(401, "RepoNotFound", "Repository not found") if self.repositories and is_read else None

    def _of(
        self,
        repository: Repository,
        is_api: bool,
        target: str,
        rest: str,
        query: Mapping[str, list[str]],
        body: bytes,
        headers: Headers,
    ) -> Answer:
        if repository.moved_to:
            return Answer(307, {"Location": target.replace(repository.name, repository.moved_to, 1)})
        verb, _, named = rest.partition("/")
        if is_api and verb == "refs":
            return _json(_refs(repository))
        revision, _, path = named.partition("/")
        commit = repository.found(unquote(revision) or "main")
        if commit is None:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
        if not is_api:
            return self._file(repository, commit, unquote(path), headers) if verb == "resolve" else Answer(404)
        if verb in ("", "revision"):
            return _json(_info(repository, commit))
        if verb == "tree":
            return self._tree(repository, commit, unquote(path), target, query)
        if verb == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            return _json(_entries(repository.commits[commit], wanted))
        if verb == "commits":
            about = {"id": commit, "title": "all", "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
            return _json([about])
        return _json({"discussions": [], "count": 0, "start": 0}) if verb == "discussions" else Answer(404)

    def _file(self, repository: Repository, commit: str, path: str, headers: Headers) -> Answer:
        about = {"X-Repo-Commit": commit}
        token = headers.get("Authorization")
        if repository.gated and token not in self.let_in:
            said = f"Access to model {repository.name} is restricted."
            return _error(403 if token else 401, "GatedRepo", said)
        content = repository.commits[commit].get(path)
        if content is None:
            return _error(404, "EntryNotFound", "Entry not found", about)
        digest = sha256(content).hexdigest()
        if len(content) > LARGE_BYTES:
            about |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest}"'}
            return Answer(302, {**about, "Location": f"{self.url.replace('127.0.0.1', 'localhost')}/store/{digest}"})
        return _ranged(content, {**about, "ETag": f'"{sha1(content).hexdigest()}"'}, headers)

    def _stored(self, digest: str, headers: Headers) -> Answer:
        contents = (file for each in self.repositories for files in each.commits.values() for file in files.values())
        found = next((each for each in contents if sha256(each).hexdigest() == digest), None)
        return Answer(404) if found is None else _ranged(found, {"ETag": f'"{digest}"'}, headers)

    def _tree(
        self, repository: Repository, commit: str, folder: str, target: str, query: Mapping[str, list[str]]
    ) -> Answer:
        files = repository.commits[commit]
        below = [name for name in files if not folder or name.startswith(folder.rstrip("/") + "/")]
        if folder and not below:
            return _error(404, "EntryNotFound", f"{folder} does not exist on {commit}")
        names = dict.fromkeys(below)
        for name in below:
            names |= dict.fromkeys(str(each) for each in PurePosixPath(name).parents if str(each) not in (".", folder))
        names = {name: None for name in names if not folder or name.startswith(folder.rstrip("/") + "/")}
        if query.get("recursive", ["False"])[0].lower() != "true":
            names = {name: None for name in names if str(PurePosixPath(name).parent) in (folder.rstrip("/"), ".")}
        begin = int(query.get("cursor", ["0"])[0])
        page = sorted(names)[begin : begin + PAGE]
        headers = {}
        if begin + PAGE < len(names):
            separator = "&" if "?" in target else "?"
            headers = {"Link": f'<{self.url}{target}{separator}cursor={begin + PAGE}>; rel="next"'}
        return _json(_entries(files, page), headers)


def _json(content: Any, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(200, {"Content-Type": "application/json", **(headers or {})}, json.dumps(content).encode())


def _error(status: int, code: str, said: str, headers: Mapping[str, str] | None = None) -> Answer:
    body = json.dumps({"error": said}).encode()
    return Answer(status, {"X-Error-Code": code, "X-Error-Message": said, **(headers or {})}, body)


def _ranged(content: bytes, about: Mapping[str, str], headers: Headers) -> Answer:
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", headers.get("Range") or "")
    if asked is None:
        return Answer(200, {**about, "Accept-Ranges": "bytes"}, content)
    begin = int(asked[1]) if asked[1] else len(content) - int(asked[2])
    end = int(asked[2]) + 1 if asked[1] and asked[2] else len(content)
    if begin >= len(content):
        return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
    part = content[begin:end]
    return Answer(206, {**about, "Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(content)}"}, part)


def _info(repository: Repository, commit: str) -> dict[str, Any]:
    made = "2026-01-01T00:00:00.000Z"
    siblings = [{"rfilename": name} for name in repository.commits[commit]]
    about: dict[str, Any] = {
        "id": repository.name,
        "sha": commit,
        "lastModified": made,
        "createdAt": made,
        "siblings": siblings,
    }
    about |= {"private": False, "disabled": False, "downloads": 0, "likes": 0}
    return about | {"tags": [], "gated": "auto" if repository.gated else False}


def _refs(repository: Repository) -> dict[str, Any]:
    def named(prefix: str) -> list[dict[str, str]]:
        found = [(ref, commit) for ref, commit in repository.refs.items() if ref.startswith(prefix)]
        return [{"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": commit} for ref, commit in found]

    branch = [{"name": "main", "ref": "refs/heads/main", "targetCommit": repository.refs["main"]}]
    return {"branches": branch, "converts": named("refs/convert/"), "tags": [], "pullRequests": named("refs/pr/")}


def _entries(files: Files, names: list[str]) -> list[dict[str, Any]]:
    """What a listing says of files, and of folders, which are names that no file has."""
    entries = []
    for name in names:
        content = files.get(name)
        if content is not None:
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content)}
            entry["oid"] = sha1(content).hexdigest()
            if len(content) > LARGE_BYTES:
                entry["lfs"] = {"oid": sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
            entries.append(entry)
        elif any(each.startswith(name + "/") for each in files):
            entries.append({"type": "directory", "path": name, "oid": sha1(name.encode()).hexdigest()})
    return entries


def resolve_url(url: str, name: str, path: str, revision: str = "main", kind: Kind = "models") -> str:
    """Where a Hub gives a file."""
    return f"{url}/{'datasets/' if kind == 'datasets' else ''}{name}/resolve/{quote(revision, safe='')}/{quote(path)}"
