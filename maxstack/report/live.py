"""Serves the report of a running job over HTTP, on this machine only."""

import contextlib
import signal
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from maxstack.errors import ConfigError
from maxstack.report.document import policy

# Not 0.0.0.0: the page has no login.
ADDRESS = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def serve(page: Callable[[], str], data: Callable[[], str], port: int) -> None:
    """Serve the page at / and its data at /data until SIGTERM or Ctrl-C. Requests for another host
    name are refused, so that no other site can reach the server through a name that resolves to
    this machine. ConfigError if the port is not available."""
    lock = threading.Lock()
    names = set[str | None]()
    kinds = {"/": ("text/html", page), "/data": ("application/json", data)}

    class Handler(BaseHTTPRequestHandler):
        timeout = 30  # seconds for which a thread waits for a client

        def do_GET(self) -> None:
            # Against DNS rebinding: a site whose name resolves to 127.0.0.1 is another origin by
            # its Host.
            if self.headers.get("Host") not in names:
                return self.send_error(421, "This server answers only to 127.0.0.1 and localhost")
            if self.path not in kinds:
                return self.send_error(404)
            kind, content = kinds[self.path]
            # One reader at a time: History.update moves on through the file.
            with lock:
                body = content().encode()
            self.send_response(200)
            headers = HEADERS | {"Content-Type": f"{kind}; charset=utf-8"}
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: a browser polls every few seconds."""

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; give another port") from error
    names |= {f"{name}:{server.server_port}" for name in (ADDRESS, "localhost")}
    # SIGTERM ends like Ctrl-C, so that the port is closed in one way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server, contextlib.suppress(KeyboardInterrupt):
        print(f"http://{ADDRESS}:{server.server_port}", flush=True)
        server.serve_forever()
