"""How `maxstack serve` listens: its address, its limits, TLS, and its end."""

import logging
import ssl
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxstack.command import argument, positive
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.inference.server.connections import Listener

log = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1", "::1", "localhost"
FLAGS = (
    argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1, this machine only)"),
    argument("--port", type=int, default=8000, help="0: any that is free (default: 8000)"),
    argument(
        "--tls-cert",
        metavar="FILE",
        help="certificate of the server and those above it, PEM, for https (default: http)",
    ),
    argument("--tls-key", metavar="FILE", help="the certificate's private key, PEM, not encrypted"),
    argument(
        "--connections",
        type=positive,
        metavar="N",
        help="at once at most (default: 1024, or what the limit of open files allows)",
    ),
    argument(
        "--connections-per-address",
        type=positive,
        metavar="N",
        help="the same of one address of a client (default: half of --connections)",
    ),
    argument(
        "--grace",
        type=positive,
        default=3600,
        metavar="S",
        help="seconds that requests have to finish after SIGTERM; then clients have 30 to read "
        "(default: 3600)",
    ),
)
CONNECTIONS = 1024


def check(args: Namespace, keys: Sequence[bytes]) -> None:
    """Read the certificate, as `args.tls`. ConfigError for it or an address that is wrong; warns of
    what others may read."""
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port {args.port}: must be a number from 0 to 65535")
    args.tls = context(args.tls_cert, args.tls_key)
    if args.host in LOOPBACK:
        return
    if not keys:
        log.warning("--host %s: everybody who can reach it may ask; see --api-key-file", args.host)
    elif not args.tls:
        log.warning(
            "--host %s: keys of clients travel in clear; see --tls-cert, or let a proxy with TLS "
            "reach it alone",
            args.host,
        )


def listen(args: Namespace) -> "Listener":
    """The socket that the server listens at, with its limits. ConfigError where it cannot."""
    from maxstack.inference.server.process import bound_socket

    listener = bound_socket(args.host, args.port)
    most = args.connections or CONNECTIONS
    listener.limit(most, args.connections_per_address or (most + 1) // 2)
    if listener.most < most:
        log.warning(
            "--connections %d: %d at once, as the limit of open files allows; see ulimit -n",
            most,
            listener.most,
        )
    listener.tls = args.tls
    return listener


def context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS by a certificate and its key; None without both. ConfigError for files that cannot be
    used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: are given together, or not at all")
    for flag, file in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {file}: cannot be read: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise ConfigError(f"{flag} {file}: is no PEM file, which has a line -----BEGIN ...")
    if Path(key).stat().st_mode & 0o007:
        log.warning("--tls-key %s: other users may read it; chmod o-rwx", key)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse(*_: Any) -> bytes:
        raise ConfigError(f"--tls-key {key}: is encrypted; give one that is not (openssl pkey)")

    try:
        made.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        what = (
            "is not the key of that certificate" if error.reason == MISMATCH else "cannot be used"
        )
        raise ConfigError(
            f"--tls-cert {certificate} --tls-key {key}: {what}: {error.reason or error}"
        ) from error
    return made


MISMATCH = "KEY_VALUES_MISMATCH"
