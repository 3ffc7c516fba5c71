"""An S3 store (moto's server) behind a proxy that fails on demand, both on loopback."""

import contextlib
import http.client
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
def served() -> Iterator[Faulty]:
    """A store with nothing in it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    proxy = Faulty(server.get_host_and_port())
    proxy.appear()
    try:
        yield proxy
    finally:
        proxy.vanish()
        server.stop()
