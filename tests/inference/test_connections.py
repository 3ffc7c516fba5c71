"""Connections of a server: real sockets and uvicorn, around a small application."""

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import strangers
from processes import until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from maxstack import cli
from maxstack.commands import serve_connections
from maxstack.errors import ConfigError
from maxstack.inference.server import admission, connections, process, protocol
from maxstack.inference.server.refusal import Refusal

TLS = Path(__file__).parents[1] / "goldens" / "tls"
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")
PIECE = b"x" * 4096
POSTED = strangers.POST % (b"/no-such-path", 10**6)


class Server:
    """A server around an application that counts what it does."""

    def __init__(self, most=64, each=64, tls=None, drain=None, grace=60.0):
        self.pieces, self.left = 0, 0
        self.release, self.up = threading.Event(), threading.Event()
        routes = [
            Route("/health", lambda request: PlainTextResponse("")),
            Route("/metrics", lambda request: PlainTextResponse(connections.text_of(request.app))),
            Route("/read", self.read, methods=["POST"]),
            Route("/digest", self.digest, methods=["POST"]),
            Route("/stream", self.stream, methods=["POST"]),
            Route("/hold", self.hold, methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={Refusal: self.refused})
        self.listener = process.bound_socket("127.0.0.1", 0)
        self.listener.limit(most, each)
        self.listener.tls = tls
        self.at = self.listener.getsockname()
        self.server = process.Server(app, self.listener, self.said, drain or self.drained, grace)

    def run(self):
        self.server.run([self.listener])

    def said(self, origin):
        self.up.set()
        return origin

    async def drained(self):
        return None

    async def read(self, request: Request):
        return JSONResponse({"size": len(await admission.read_bytes(request, 1000))})

    async def digest(self, request: Request):
        found = await admission.read_bytes(request, 8 << 20)
        return PlainTextResponse(hashlib.sha256(found).hexdigest())

    async def refused(self, request: Request, error: Refusal):
        return JSONResponse(error.body, error.status, error.headers)

    async def stream(self, request: Request):
        async def pieces():
            try:
                while True:
                    self.pieces += 1
                    yield PIECE
                    await asyncio.sleep(0)
            finally:
                self.left += 1

        return StreamingResponse(pieces())

    async def hold(self, request: Request):
        await asyncio.to_thread(self.release.wait, 30)
        return PlainTextResponse("")

    def ask(self, **options):
        """The status of a request by a connection of its own."""
        return httpx.get(f"http://127.0.0.1:{self.at[1]}/health", timeout=2, **options).status_code

    def figure(self, reason):
        return self.listener.closed[reason]


@contextlib.contextmanager
def serving(**options):
    """The server in a thread of this process."""
    server = Server(**options)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.up.wait(30)
    try:
        yield server
    finally:
        server.release.set()
        server.listener.end_all()
        server.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def rest_of(connection):
    """What comes until a connection ends or is cut."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(4096):
            answer += more
    return answer


ATTACKS = {
    "head": strangers.slow_heads,
    "silent": strangers.silent,
    "body": lambda at: strangers.slow_bodies(at, b"/read"),
    "idle": strangers.idle,
    "reading": lambda at: strangers.unread(at, b"/stream", b"", 100),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_a_good_client_is_answered_while_one_address_opens_all_that_it_can(kind):
    files, wanted = len(os.listdir("/proc/self/fd")), {"silent": "head"}.get(kind, kind)
    with serving(most=32, each=32) as server:
        with ATTACKS[kind](server.at):
            until(lambda: [each.state for each in [*server.listener.open]] == [wanted] * 32)
            for _ in range(5):
                assert server.ask() == 200
            assert len(server.listener.open) <= 32
            figures = httpx.get(f"http://127.0.0.1:{server.at[1]}/metrics").text
            closed = server.figure("crowd") + server.figure("refused")
            assert closed > 60 and f'reason="crowd"}} {server.figure("crowd")}\n' in figures
        until(lambda: len(server.listener.known) <= 1)
    assert len(os.listdir("/proc/self/fd")) <= files + 1


@pytest.mark.parametrize(
    ("wait", "hold", "trickles"),
    [
        ("head", strangers.slow_heads, True),
        ("head", lambda at, count: strangers.opened(at, count, POSTED), True),
        ("head", strangers.silent, False),
        ("idle", strangers.idle, False),
    ],
    ids=["bytes now and then", "a body that nobody reads", "handshake of TLS", "kept"],
)
def test_each_wait_for_a_client_has_its_time(wait, hold, trickles, monkeypatch):
    monkeypatch.setitem(connections.SECONDS, wait, 0.3)
    tls = serve_connections.context(CERT, KEY) if hold is strangers.silent else None
    with serving(tls=tls) as server, hold(server.at, 4) as opened:
        began = time.monotonic()
        while trickles and strangers.trickle(opened) and time.monotonic() - began < 10:
            time.sleep(0.05)
        assert all(strangers.ended(each) for each in opened)
        assert time.monotonic() - began < 5 and server.figure(wait) == 4
        until(lambda: not server.listener.known)


def test_a_body_that_is_too_slow_is_refused_and_its_connection_closed(monkeypatch):
    monkeypatch.setattr(admission, "BODY_SECONDS", 0.3)
    with serving() as server, strangers.slow_bodies(server.at, b"/read", 1) as opened:
        opened[0].settimeout(10)
        answer = rest_of(opened[0])
        assert answer.startswith(b"HTTP/1.1 408") and b"connection: close" in answer.lower()


def test_a_stream_that_is_not_read_is_bounded_and_ended(monkeypatch):
    monkeypatch.setitem(connections.SECONDS, "reading", 0.5)
    with serving() as server, strangers.unread(server.at, b"/stream", b"", 4) as opened:
        until(lambda: server.left == 4)
        assert server.figure("reading") == 4
        kept = 2 * connections.BUFFER + 4 * 65536  # of the system and of the transport
        received = opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert server.pieces * len(PIECE) < 4 * (kept + 32 * received)


def test_a_stream_that_is_read_slowly_goes_on(monkeypatch):
    monkeypatch.setitem(connections.SECONDS, "reading", 0.5)
    with serving() as server, strangers.unread(server.at, b"/stream", b"", 1) as opened:
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            assert opened[0].recv(1 << 20)
            time.sleep(0.05)
        assert server.figure("reading") == 0 and server.left == 0


def test_who_opens_many_connections_pushes_out_their_own():
    with serving(most=32, each=24) as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.at[1]}") as kept:
            assert kept.get("/health").status_code == 200
            (own,) = server.listener.open
            with strangers.opened(server.at, 100, come_from="127.0.0.2"):
                until(lambda: server.figure("crowd") == 76)
                assert len([*server.listener.open]) == 25
                assert own in server.listener.open
                assert kept.get("/health").status_code == 200


def test_where_all_connections_are_busy_another_one_is_told_so():
    with serving(most=4, each=4) as server:
        ask = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with strangers.opened(server.at, 4, ask):
            until(lambda: [each.state for each in server.listener.open] == ["answer"] * 4)
            with socket.create_connection(server.at, 10) as one:
                answer = rest_of(one)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1\r\n" in answer
            assert server.figure("refused") == 1
            server.release.set()
        until(lambda: not server.listener.open)
        assert server.ask() == 200


def test_no_descriptors_are_left_and_nothing_spins(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving() as server, contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(30)]
        free = os.dup(0)
        os.close(free)
        used = time.process_time()
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            for each in made:
                each.settimeout(5)
                each.connect(server.at)
            ends = [strangers.ended(each) for each in made]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert all(ends) and time.process_time() - used < 1
        assert server.ask() == 200
    assert not caplog.records


@pytest.mark.slow
def test_a_limit_of_files_leaves_the_server_its_own():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = (
        "import resource, sys\n"
        "from maxstack.inference.server.process import bound_socket\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))\n"
        "found = bound_socket('127.0.0.1', 0)\n"
        "found.limit(1024, 512)\n"
        "print(found.most, found.each, resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def limits(most):
        words = [sys.executable, "-c", program, f"{most}"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    assert limits(256).stdout.split() == ["128", "128", "256"]
    assert limits(4096).stdout.split() == ["1024", "512", "1152"]
    assert "ConfigError: this process may open 128 files" in limits(128).stderr


CHUNKED = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
MANY = b"a:b\r\n" * 12_000 + b"\r\n"
INVALID = {
    "101 fields": (strangers.HEAD + b"a:b\r\n" * 100 + b"\r\n", b"HTTP/1.1 431 "),
    "a long field": (strangers.HEAD + b"a:" + b"b" * 17_000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
    "trailer": (CHUNKED % b"/read" + b"1\r\na\r\n0\r\n" + MANY, b"HTTP/1.1 431 "),
    "chunks": (CHUNKED % b"/read" + b"1\r\na\r\n" * 100_000, b"HTTP/1.1 413 "),
    "chunks to nowhere": (CHUNKED % b"/none" + b"1\r\na\r\n" * 100_000, b""),
    "a chunk of no length": (CHUNKED % b"/read" + b"x\r\n", b"HTTP/1.1 400 "),
    "digits": (
        strangers.HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 400 ",
    ),
}


def answer_of(at, sent):
    """What comes until the end of a connection by which this is sent."""
    with socket.create_connection(at, 10) as one:
        with contextlib.suppress(ConnectionError):
            one.sendall(sent)
        return rest_of(one)


@pytest.mark.parametrize("kind", INVALID)
def test_what_is_no_request_is_closed_in_little_time_and_without_a_line(kind, monkeypatch, caplog):
    sent, begins = INVALID[kind]
    run, spent = asyncio.Handle._run, [0.0]

    def timed(handle):
        began = time.thread_time()
        run(handle)
        spent.append(time.thread_time() - began)

    with serving() as server:
        assert server.ask() == 200
        monkeypatch.setattr(asyncio.Handle, "_run", timed)
        answer = answer_of(server.at, sent)
        until(lambda: server.figure("invalid") == 1)
        monkeypatch.undo()
        # a connection that is closed with bytes unread may lose its answer
        assert len(sent) > 1 << 16 or answer.startswith(begins)
        assert max(spent) < 0.02
        assert server.ask() == 200
    assert not caplog.records


def test_what_is_wrong_after_an_answer_leaves_no_line(caplog):
    upgrade = b"Connection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    with serving() as server, socket.create_connection(server.at, 10) as one:
        one.sendall(CHUNKED % b"/none")
        assert one.recv(4096).startswith(b"HTTP/1.1 404 ")
        one.sendall(b"no length\r\n")
        assert strangers.ended(one) and server.figure("invalid") == 1
        assert answer_of(server.at, strangers.HEAD + upgrade).startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_a_head_of_a_hundred_fields_is_answered():
    fields = b"a:b\r\n" * 98 + b"Connection: close\r\n\r\n"
    with serving() as server:
        assert answer_of(server.at, strangers.HEAD + fields).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("size", [600, 4096, 1 << 16])
def test_bodies_of_many_chunks_arrive_as_they_were_sent(size):
    data = os.urandom(1 << 20)
    parts = [data[at : at + size] for at in range(0, len(data), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    one = CHUNKED % b"/digest" + chunks + b"0\r\n\r\n"
    with serving() as server:
        answer = answer_of(server.at, one * 3 + strangers.HEAD + b"Connection: close\r\n\r\n")
    assert answer.count(hashlib.sha256(data).hexdigest().encode()) == 3
    assert answer.count(b"HTTP/1.1 200 ") == 4


def test_a_body_that_is_not_read_stays_with_its_client(monkeypatch):
    made, begin = [], protocol.Protocol.connection_made

    def noted(protocol, transport):
        made.append(protocol)
        begin(protocol, transport)

    monkeypatch.setattr(protocol.Protocol, "connection_made", noted)
    with serving() as server, socket.create_connection(server.at, 10) as one:
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.sendall(CHUNKED % b"/hold" + (b"258\r\n" + b"a" * 600 + b"\r\n") * 40_000)
        kept = len(made[0].cycle.body) + len(made[0].conn.trailing_data[0])
        assert 0 < kept < 1 << 20


STREAMS = """
import runpy, sys
from maxstack.inference.server import process
process.GRACE = 1.5
runpy.run_path(sys.argv[1])["Server"]().run()
"""


@pytest.mark.slow
def test_a_signal_ends_a_server_whose_streams_nobody_reads():
    words = [sys.executable, "-c", STREAMS, __file__]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = subprocess.Popen(
        words, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    port = int(started.stdout.readline().rpartition(":")[2])
    with strangers.unread(("127.0.0.1", port), b"/stream", b"", 16):
        time.sleep(1)
        began = time.monotonic()
        started.send_signal(signal.SIGTERM)
        said = started.communicate(timeout=30)[0]
        assert time.monotonic() - began < 8
    assert started.returncode == 0 and "Traceback" not in said and "ancel" not in said


def test_requests_that_run_on_after_the_grace_are_cut_short(capsys):
    async def never():
        await asyncio.Event().wait()

    with serving(drain=never, grace=0.3) as server:
        with strangers.unread(server.at, b"/stream", b"", 2) as opened:
            until(lambda: server.pieces > 2)
            server.server.handle_exit(signal.SIGTERM, None)
            assert all(strangers.ended(each) for each in opened)
    said = capsys.readouterr()
    assert "requests still running after 0.3 s are cut off" in said.out
    assert "Traceback" not in said.err


def test_a_client_that_trusts_the_certificate_is_answered_by_tls():
    tls = serve_connections.context(CERT, KEY)
    with serving(tls=tls) as server:
        trusted = ssl.create_default_context(cafile=CERT)
        found = httpx.get(f"https://localhost:{server.at[1]}/health", verify=trusted)
        assert found.status_code == 200
        trusted.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"https://localhost:{server.at[1]}/health", verify=trusted)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{server.at[1]}/health")


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (CERT, None, "--tls-cert and --tls-key: give both or neither"),
        (None, KEY, "--tls-cert and --tls-key: give both or neither"),
        (CERT, "none.pem", "--tls-key none.pem: cannot be read: No such file"),
        (CERT, str(TLS / "another-key.pem"), "the key does not belong to the certificate"),
        (CERT, str(TLS / "encrypted-key.pem"), "is encrypted; decrypt it"),
        (CERT, __file__.replace("test_connections", "test_fields"), "is not a PEM file"),
        (KEY, KEY, "cannot be used"),
    ],
)
def test_a_certificate_that_does_not_serve_is_refused_before_the_model_is_read(
    certificate, key, words, capsys
):
    flags = (("--tls-cert", certificate), ("--tls-key", key))
    given = [word for flag, file in flags if file for word in (flag, file)]
    assert cli.main(["serve", "no-such-folder", *given]) == 1
    assert words in (said := capsys.readouterr().err) and "Traceback" not in said


def test_a_key_that_others_may_read_is_told(tmp_path, caplog):
    (tmp_path / "key.pem").write_bytes(Path(KEY).read_bytes())
    for mode, told in ((0o600, 0), (0o640, 0), (0o644, 1)):
        caplog.clear()
        (tmp_path / "key.pem").chmod(mode)
        serve_connections.context(CERT, str(tmp_path / "key.pem"))
        assert sum("other users can read it" in each.message for each in caplog.records) == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--tls-cert", CERT, "--tls-key", KEY], False),
    ],
)
def test_keys_that_travel_in_clear_are_told(options, told, tmp_path, caplog):
    (tmp_path / "keys").write_text("key")
    words = ["serve", "no-such-folder", "--api-key-file", str(tmp_path / "keys"), *options]
    assert cli.main(words) == 1
    assert ("API keys are sent in clear text" in caplog.text) == told


def test_a_pem_file_that_cannot_be_read_is_one_sentence(tmp_path):
    (tmp_path / "cert.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    with pytest.raises(ConfigError, match="cannot be used"):
        serve_connections.context(str(tmp_path / "cert.pem"), KEY)
