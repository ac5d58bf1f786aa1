"""A Hub on this machine that takes uploads, keeps what it was sent, and gives one model."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BASE = "them/base"  # the name of the model that it gives
_FILES = f"/{BASE}/resolve/"


@dataclass
class Hub:
    """What was sent.

    Attributes:
        refuses: whether it answers a commit by an error.
        away_for: so many requests for a repository are refused first.
        tokens: of the requests.
        files: of the commits, by path.
        sent: all requests' paths and bodies.
        base: the folder of the model that it gives as `BASE`, or None.
    """

    refuses: bool = False
    away_for: int = 0
    url: str = ""
    tokens: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)
    base: Path | None = None

    def content(self, path: str) -> bytes | None:
        """Of a file of the model that it gives; None where there is none of this path."""
        if self.base is None or not path.startswith(_FILES):
            return None
        file = self.base / path.removeprefix(_FILES).partition("/")[2]
        return file.read_bytes() if file.is_file() else None

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        self.sent += [path.encode(), body]
        if path == "/api/repos/create":
            self.away_for -= 1
            return (503, {"error": "away"}) if self.away_for >= 0 else (200, {"url": f"{self.url}/me/out"})
        if path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            return 200, {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
            }
        if self.base is not None and path in (f"/api/models/{BASE}", f"/api/models/{BASE}/revision/main"):
            files = [{"rfilename": file.name} for file in sorted(self.base.iterdir())]
            return 200, {"id": BASE, "sha": "0" * 40, "tags": ["license:mit"], "siblings": files}
        if path.endswith("/validate-yaml"):
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/commit/main") and not self.refuses:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"{self.url}/me/out/commit/1", "commitOid": "1", "pullRequestUrl": None}
        return (403 if self.refuses else 404), {"error": "no"}


@contextmanager
def hub(refuses: bool = False) -> Iterator[Hub]:
    """A Hub that runs while the block does; give its `url` by HF_ENDPOINT."""
    kept = Hub(refuses)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kept.tokens.add(self.headers.get("Authorization") or "")
            code, content = kept.answer(self.path, body)
            self._send(code, json.dumps(content).encode(), {"Content-Type": "application/json"})

        def do_GET(self) -> None:
            content = kept.content(self.path)
            if content is not None:
                self._send(200, content, {"X-Repo-Commit": "0" * 40, "ETag": f'"{sha256(content).hexdigest()}"'})
            elif self.path.startswith(_FILES):
                self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40})
            else:
                self.do_POST()

        do_HEAD = do_GET  # noqa: N815

        def _send(self, code: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
