"""Grammars of strangers are compiled in a process of their own first: the library ends the process
that gives it rules nested too deeply, and may take minutes or all memory for others."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from maxstack.errors import ConfigError
from maxstack.inference.grammar import Compiler, Vocabulary
from maxstack.rewards.lines import Lines
from maxstack.rewards.processes import address_space, end_with_parent

STACK = 2 << 20
"""Bytes of stack in which a grammar has to compile. Threads that use it have more."""
SECONDS, START_SECONDS = 3, 120
"""Processor time that a grammar may take, and seconds until the process is ready."""
WALL_SECONDS = 60
"""Seconds for a grammar, on a machine that is busy with other work."""
MEMORY = 512 << 20
"""Bytes that a grammar may take."""
_ENDS: dict[int, str] = {
    signal.SIGSEGV: f"needs more than {STACK >> 20} MiB of stack, for rules nested too deeply",
    signal.SIGABRT: f"needs more than {MEMORY >> 20} MiB of memory",
}


class Trial:
    """The process, started at the first grammar and again after it ended. Any thread may call it,
    one at a time goes on."""

    def __init__(self, vocabulary: Vocabulary, seconds: int = SECONDS):
        self._vocabulary, self._seconds = vocabulary, seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: Lines | None = None

    def check(self, kind: str, value: Any) -> None:
        """ConfigError for a grammar of `Compiler.compile` that cannot be compiled within the
        limits."""
        with self._lock:
            lines = self._started()
            try:
                lines.send({"kind": kind, "value": value, "seconds": self._seconds}, WALL_SECONDS)
                reason = lines.receive(WALL_SECONDS)["reason"]
            except TimeoutError:
                self.end()
                raise ConfigError(f"grammar: took more than {WALL_SECONDS} s to compile") from None
            except EOFError:
                raise ConfigError(f"grammar: {self._why()}; give a simpler one") from None
        if reason:
            raise ConfigError(reason)

    def end(self) -> None:
        """End the process, and what `check` waits for."""
        if self._process:
            self._process.kill()

    def _started(self) -> Lines:
        """The socket to the process. RuntimeError if it does not start."""
        if self._lines and self._process and self._process.poll() is None:
            return self._lines
        if self._lines:
            self._lines.close()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "maxstack.inference.trial"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        lines = self._lines = Lines(ours)
        words = self._vocabulary
        tokens = [token.decode("latin-1") for token in words.tokens]
        try:
            lines.send({"tokens": tokens, "stop": words.special_token_ids}, START_SECONDS)
            lines.receive(START_SECONDS)
        except (EOFError, TimeoutError) as error:
            self.end()
            raise RuntimeError("the process that tries grammars did not start") from error
        return lines

    def _why(self) -> str:
        """How the process ended."""
        assert self._process
        code = self._process.wait()
        if -code == signal.SIGXCPU:
            return f"takes more than {self._seconds} s of processor time"
        return _ENDS.get(-code, f"ended the process that tried it (exit code {code})")


def main(number: int, parent: int) -> None:
    """Try grammars, one after the other, until the parent ends."""
    end_with_parent(parent)
    lines = Lines(socket.socket(fileno=number))
    given = lines.receive(START_SECONDS)
    tokens = [token.encode("latin-1") for token in given["tokens"]]
    compiler = Compiler(Vocabulary(tokens, given["stop"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if size := address_space():
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    threading.stack_size(STACK)
    lines.send({})
    with contextlib.suppress(EOFError):
        while True:
            ask, reason = lines.receive(), list[str]()
            used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            limits = int(used) + ask["seconds"] + 1, resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, limits)
            thread = threading.Thread(target=_try, args=(compiler, ask, reason))
            thread.start()
            thread.join()
            lines.send({"reason": reason[0]})


def _try(compiler: Compiler, ask: dict[str, Any], reason: list[str]) -> None:
    try:
        compiler.compile(ask["kind"], ask["value"])
    except ConfigError as error:
        reason.append(str(error))
    except MemoryError:
        reason.append(f"grammar: needs more than {MEMORY >> 20} MiB of memory")
    else:
        reason.append("")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
