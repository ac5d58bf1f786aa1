"""A Hub on this machine that takes uploads and keeps what it was sent."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hub:
    """What was sent.

    Attributes:
        refuses: whether it answers a commit by an error.
        away_for: so many requests for a repository are refused first.
        tokens: of the requests.
        files: of the commits, by path.
        sent: all requests' paths and bodies.
    """

    refuses: bool = False
    away_for: int = 0
    url: str = ""
    tokens: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)
    sent: list[bytes] = field(default_factory=list)

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
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_GET = do_HEAD = do_POST  # noqa: N815

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
