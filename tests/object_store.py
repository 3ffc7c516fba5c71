"""Stores on loopback: S3 (moto's server) and Google Cloud Storage (gcp-storage-emulator) behind a
proxy that fails on demand, and a hub of datasets."""

import contextlib
import hashlib
import http.client
import json
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


@dataclass
class Faulty:
    """A proxy of a store. `fault`: called with method and path of each request; what it returns
    happens to it: a status to answer, a share of the body after which the connection ends, or a
    function to call before the request goes on. `requests`: how many came."""

    target: tuple[str, int]
    fault: Callable[[str, str], int | float | Callable[[], None] | None] = lambda method, path: None
    requests: list[str] = field(default_factory=list)
    port: int = 0
    _server: socketserver.BaseServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def appear(self) -> None:
        """Listen, on the same port as before."""
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                proxy.requests.append(f"{self.command} {self.path}")
                happens = proxy.fault(self.command, self.path)
                if callable(happens):
                    happens = happens()
                if isinstance(happens, int):
                    self.send_response(happens)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                upstream = http.client.HTTPConnection(*proxy.target, timeout=20)
                upstream.request(self.command, self.path, body or None, dict(self.headers))
                answer = upstream.getresponse()
                data = answer.read()
                upstream.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in _HOP:
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(data)))
                self.end_headers()
                if isinstance(happens, float):
                    data, self.close_connection = data[: int(len(data) * happens)], True
                self.wfile.write(data)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def vanish(self) -> None:
        """Refuse connections; those that are open answer 503."""
        assert isinstance(self._server, ThreadingHTTPServer)
        self._server.shutdown()
        self._server.server_close()

    def vanish_for(self, seconds: float) -> None:
        """Be away from now on, and back after so many seconds, without waiting for it."""
        self.fault, before = (lambda method, path: 503), self.fault
        self.vanish()

        def back() -> None:
            time.sleep(seconds)
            self.fault = before
            self.appear()

        threading.Thread(target=back, daemon=True).start()


@contextlib.contextmanager
def served(scheme: str = "s3") -> Iterator[Faulty]:
    """A store with nothing in it, for s3:// or gs://."""
    server, target = _started(scheme)
    proxy = Faulty(target)
    proxy.appear()
    try:
        yield proxy
    finally:
        proxy.vanish()
        server.stop()


def environment(store: Faulty) -> dict[str, str]:
    """Variables by which the drivers of stores find this one."""
    return {
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_MAX_ATTEMPTS": "1",
        "STORAGE_EMULATOR_HOST": store.url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # which asks Google
    }


def _started(scheme: str) -> tuple[Any, tuple[str, int]]:
    """A running server and its address."""
    if scheme == "s3":
        from moto.server import ThreadedMotoServer

        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        return server, server.get_host_and_port()
    from gcp_storage_emulator.server import create_server

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True)
    server.start()
    return server, ("127.0.0.1", port)


@contextlib.contextmanager
def hub(files: Mapping[str, bytes]) -> Iterator[str]:
    """The URL of a hub with one dataset, Some/Data; `files` may change."""

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, status = self.path.partition("?")[0].removeprefix("/api"), 200
            _, _, inside = path.partition("/main")
            inside = urllib.parse.unquote(inside.strip("/"))
            if path == "/datasets/Some/Data":
                body = json.dumps({"id": "Some/Data", "sha": "a" * 40}).encode()
            elif path.startswith("/datasets/Some/Data/tree/main"):
                body = json.dumps([*_entries(files, f"{inside}/" if inside else "")]).encode()
            elif path.startswith("/datasets/Some/Data/paths-info/main"):
                names = urllib.parse.parse_qs(asked.decode())["paths"]
                body = json.dumps([_entry(name, files[name]) for name in names]).encode()
            elif inside in files and "/resolve/" in path:
                start, _, stop = self.headers["Range"].removeprefix("bytes=").partition("-")
                body, status = files[inside][int(start) : int(stop) + 1], 206
            else:
                body, status = b"", 404
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _entry(name: str, content: bytes) -> dict[str, Any]:
    sha1 = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": sha1}


def _entries(files: Mapping[str, bytes], folder: str) -> Iterator[dict[str, Any]]:
    """What a folder, with its /, holds."""
    folders = set()
    for name, content in files.items():
        head, deeper, _ = name.removeprefix(folder).partition("/")
        if name.startswith(folder) and deeper:
            folders.add(folder + head)
        elif name.startswith(folder):
            yield _entry(name, content)
    yield from ({"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders))
