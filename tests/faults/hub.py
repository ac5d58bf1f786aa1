"""A Hub on this machine that takes uploads, keeps what it was sent, gives repositories, and fails as a test asks."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from tests.hub_layouts.shelf import Shelf

BASE = "them/base"  # the name of the model that it gives
_FILES = f"/{BASE}/resolve/"
_OF_PULL_REQUEST: dict[str, Any] = {"author": {"name": "me"}, "createdAt": "2026-01-01T00:00:00.000Z"}
_OF_PULL_REQUEST |= {
    "status": "draft",
    "repo": {"name": "me/out", "type": "model"},
    "isPullRequest": True,
    "events": [],
}
_OF_PULL_REQUEST |= {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}


@dataclass
class Fault:
    """What becomes of some requests.

    Attributes:
        part: of their paths.
        answer: a status, or what happens to the connection. A slow answer comes after a second, and one that is cut
            ends in the middle of a file.
        times: so many requests fail.
        headers: of the answer.
    """

    part: str
    answer: int | Literal["drop", "slow", "cut"]
    times: int = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Hub:
    """What was sent.

    Attributes:
        refuses: whether it answers a commit by an error.
        away_for: so many requests for a repository are refused first.
        large: end of the names of files that go to the storage of large files.
        faults: of the requests to come.
        tokens: of the requests.
        files: of the commits, by path.
        commits: branch or reference, title and paths of each.
        made: the bodies of the requests for a repository.
        stored: large files, by their digest.
        sent: all requests' paths and bodies.
        base: the folder of the model that it gives as `BASE`, or None.
        shelf: the repositories that it gives.
        role: of the token of its user: write or read.
    """

    refuses: bool = False
    away_for: int = 0
    url: str = ""
    large: str = "none is large"
    faults: list[Fault] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)
    base: Path | None = None
    role: str = "write"
    shelf: Shelf = field(default_factory=Shelf)

    def content(self, path: str) -> bytes | None:
        """Of a file of the model that it gives; None where there is none of this path."""
        if self.base is None or not path.startswith(_FILES):
            return None
        file = self.base / path.removeprefix(_FILES).partition("/")[2]
        return file.read_bytes() if file.is_file() else None

    def fault(self, path: str) -> Fault | None:
        """The next fault of a request, which has one less of it then."""
        found = next((each for each in self.faults if each.part in path and each.times > 0), None)
        if found is not None:
            found.times -= 1
        return found

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        self.sent += [path.encode(), body]
        if path == "/api/repos/create":
            self.away_for -= 1
            self.made.append(json.loads(body))
            return (503, {"error": "away"}) if self.away_for >= 0 else (200, {"url": f"{self.url}/me/out"})
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "orgs": [{"name": "team"}], "auth": {"accessToken": {"role": self.role}}}
        if path.endswith("/auth-check/write") or "/branch/" in path:
            return 200, {}
        if "/preupload/" in path:
            asked = [each["path"] for each in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(self.large) else "regular" for name in asked}
            return 200, {"files": [{"path": n, "uploadMode": modes[n], "shouldIgnore": False} for n in asked]}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._large_file(each) for each in json.loads(body)["objects"]]}
        if path.startswith("/stored/"):
            self.stored[sha256(body).hexdigest()] = body
            return 200, {}
        if "/discussions" in path:
            return 200, {"num": 1, "title": "a pull request", **_OF_PULL_REQUEST}
        if self.base is not None and path in (f"/api/models/{BASE}", f"/api/models/{BASE}/revision/main"):
            files = [{"rfilename": file.name} for file in sorted(self.base.iterdir())]
            return 200, {"id": BASE, "sha": "0" * 40, "tags": ["license:mit"], "siblings": files}
        if path.endswith("/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if "/commit/" in path and not self.refuses:
            self._commit(unquote(path.rpartition("/")[2]), [json.loads(line) for line in body.splitlines()])
            return 200, {"commitUrl": f"{self.url}/me/out/commit/1", "commitOid": "1", "pullRequestUrl": None}
        return (403 if self.refuses else 404), {"error": "no"}

    def _large_file(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Where a large file goes; nowhere if it is here."""
        there = {"actions": {"upload": {"href": f"{self.url}/stored/{asked['oid']}"}}}
        return asked if asked["oid"] in self.stored else asked | there

    def _commit(self, branch: str, lines: list[dict[str, Any]]) -> None:
        values = [each["value"] for each in lines]
        for each in values[1:]:
            is_large = "oid" in each
            self.files[each["path"]] = self.stored[each["oid"]] if is_large else base64.b64decode(each["content"])
        self.commits.append((branch, values[0]["summary"], sorted(each["path"] for each in values[1:])))


@contextmanager
def hub(refuses: bool = False) -> Iterator[Hub]:
    """A Hub that runs while the block does; give its `url` by HF_ENDPOINT."""
    kept = Hub(refuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self._body()
            kept.tokens.add(self.headers.get("Authorization") or "")
            path = urlsplit(self.path).path
            fault = kept.fault(unquote(path))
            if fault is not None and fault.answer == "drop":
                self.close_connection = True
                return
            if fault is not None and isinstance(fault.answer, int):
                kept.sent += [path.encode(), body]
                headers = {"Content-Type": "application/json", **fault.headers}
                self._send(fault.answer, b'{"error": "told to"}', headers)
                return
            if fault is not None and fault.answer == "slow":
                time.sleep(1)
            given = kept.shelf.answer(self.path, body, self.headers)
            if given is not None:
                self._send(given.status, given.body, given.headers, cut=fault is not None and fault.answer == "cut")
                return
            code, content = kept.answer(path, body)
            self._send(code, json.dumps(content).encode(), {"Content-Type": "application/json"})

        do_PUT = do_POST  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def do_GET(self) -> None:
            content = kept.content(self.path)
            if content is not None:
                self._send(200, content, {"X-Repo-Commit": "0" * 40, "ETag": f'"{sha256(content).hexdigest()}"'})
            elif self.path.startswith(_FILES):
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40})
            else:
                self.do_POST()

        do_HEAD = do_GET  # noqa: N815

        def _send(self, code: int, content: bytes, headers: dict[str, str], cut: bool = False) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
                self.close_connection |= cut

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = kept.shelf.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
