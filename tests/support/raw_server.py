"""An HTTP server that says exactly the bytes that a test wants said, when it wants it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
Script = Callable[[dict[str, Any], Callable[[bytes], None]], None]
"""Gets the body of a request and a function that sends bytes; the connection is closed when it returns."""


@dataclass
class RawServer:
    """``bodies`` and ``headers`` are those of the requests so far."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def answering(script: Script) -> Iterator[RawServer]:
    """A server that answers every POST by ``script``, and lists one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"data": [{"id": "raw"}]}'
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            server.headers.append(dict(self.headers))
            with suppress(OSError):  # the client may be gone
                script(body, self.send)

        def send(self, data: bytes) -> None:
            self.wfile.write(data)
            self.wfile.flush()

        def log_message(self, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 128

    http = Server(("127.0.0.1", 0), Handler)
    server = RawServer(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, str) else json.dumps(content)).encode() + b"\n\n"


def text_event(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage_event(prompt: int, output: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output} | details})
