"""The listening socket of `maxstack serve`: address, connection limits, TLS and shutdown."""

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
    argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine only)",
    ),
    argument("--port", type=int, default=8000, help="port, 0 for any free one (default: 8000)"),
    argument(
        "--tls-cert",
        metavar="FILE",
        help="TLS certificate chain in PEM format, enables HTTPS (default: HTTP)",
    ),
    argument(
        "--tls-key",
        metavar="FILE",
        help="unencrypted private key of the certificate, in PEM format",
    ),
    argument(
        "--connections",
        type=positive,
        metavar="N",
        help="maximum connections (default: 1024, or fewer if open files are limited)",
    ),
    argument(
        "--connections-per-address",
        type=positive,
        metavar="N",
        help="maximum connections per client address (default: half of --connections)",
    ),
    argument(
        "--grace",
        type=positive,
        default=3600,
        metavar="S",
        help="seconds for requests to finish after SIGTERM; clients then have 30 s to read their "
        "answers (default: 3600)",
    ),
)
CONNECTIONS = 1024


def check(args: Namespace, keys: Sequence[bytes]) -> None:
    """Read the certificate into `args.tls`. ConfigError for a wrong certificate or address; warn of
    open access and of keys sent in clear text."""
    if not 0 <= args.port < 65536:
        raise ConfigError(f"--port {args.port}: must be a number from 0 to 65535")
    args.tls = context(args.tls_cert, args.tls_key)
    if args.host in LOOPBACK:
        return
    if not keys:
        log.warning(
            "--host %s: anyone who can reach it may send requests; see --api-key-file", args.host
        )
    elif not args.tls:
        log.warning(
            "--host %s: API keys are sent in clear text; use --tls-cert, or make it reachable only "
            "by a TLS proxy",
            args.host,
        )


def listen(args: Namespace) -> "Listener":
    """Open the listening socket with its limits. ConfigError if it cannot be opened."""
    from maxstack.inference.server.process import bound_socket

    listener = bound_socket(args.host, args.port)
    most = args.connections or CONNECTIONS
    listener.limit(most, args.connections_per_address or (most + 1) // 2)
    if listener.most < most:
        log.warning(
            "--connections %d: the limit of open files allows only %d; see ulimit -n",
            most,
            listener.most,
        )
    listener.tls = args.tls
    return listener


def context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Make the TLS context of a certificate and its key; None without them. ConfigError for files
    that cannot be used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key: give both or neither")
    for flag, file in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag} {file}: cannot be read: {error.strerror}") from error
        if b"-----BEGIN " not in text:
            raise ConfigError(f"{flag} {file}: is not a PEM file, which has a line -----BEGIN ...")
    if Path(key).stat().st_mode & 0o007:
        log.warning("--tls-key %s: other users can read it; chmod o-rwx it", key)
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse(*_: Any) -> bytes:
        raise ConfigError(f"--tls-key {key}: is encrypted; decrypt it with openssl pkey")

    try:
        made.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        problem = "the key does not belong to the certificate" if mismatch else "cannot be used"
        raise ConfigError(
            f"--tls-cert {certificate} --tls-key {key}: {problem}: {error.reason or error}"
        ) from error
    return made
