"""A process that answers requests within limits, for code that may crash, hang or fill the memory:
tokenizers and templates of unknown origin.

A module runs `answer_all` as its own program, and another process asks it by `Limited`. Messages
are JSON after their length in eight bytes. Each request has a timer of processor time, a limit of
address space and a thread with a stack of known size; whatever exceeds one ends the process by a
signal, from which `Limited` knows the reason, and the next request starts another."""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

WAIT = 60
"""Seconds to wait for an answer, on a machine that is busy with other work."""


class Ended(Exception):
    """Why there is no answer."""


class Limited:
    """The process of a module, started at the first request and again after it ended. Any thread
    may ask; one request is answered at a time."""

    def __init__(self, module: str, start: Any, seconds: float, memory: int, stack: int = 0):
        """`start`: JSON that the process gets first. A request may take `seconds` of processor
        time, and `memory` bytes beyond those of the start, on a `stack` of this many bytes."""
        self._start, self._lock = start, threading.Lock()
        limits = str(seconds), str(memory), str(stack)
        # A program of its own, not a fork: threads of jax or tokenizers that hold locks would hang
        # a fork.
        self._words = [sys.executable, "-P", "-m", module, *limits]  # -P: nothing of the folder
        self._ends: dict[int, str] = {
            # The way in which the process ends tells which limit it met; it may be too broken to
            # say so itself.
            signal.SIGPROF: f"takes more than {seconds} s of processor time",
            signal.SIGSEGV: f"needs more than {stack >> 20} MiB of stack: it is nested too deeply",
            signal.SIGABRT: f"needs more than {memory >> 20} MiB of memory",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> Any:
        """The answer to a request, both JSON. Ended where there is none."""
        with self._lock:
            # Kept between requests, since starting Python takes far longer than an answer (84 us
            # for a short conversation).
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # Crashes of foreign code write traces of their own; `Ended` says what happened.
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    # Ctrl-C at a terminal goes to the whole group of processes; this one ends with
                    # its parent's pipe.
                    start_new_session=True,
                )
                self._exchange(self._start)
            return self._exchange(request)

    def end(self) -> None:
        """Kill the process, with any request under way."""
        if self._process:
            self._process.kill()

    def _exchange(self, request: Any) -> Any:
        process = self._process
        assert process and process.stdin and process.stdout
        try:
            _send(process.stdin, request)
            # The timer counts processor time, so a process that sleeps needs a limit by the clock
            # too.
            if select.select([process.stdout], [], [], WAIT)[0]:
                return _receive(process.stdout)
            process.kill()
        except (OSError, EOFError):
            pass  # it has ended, or is about to
        # Reaps the process, so that its exit code says how it ended.
        process.communicate()
        code = process.returncode
        raise Ended(self._ends.get(-code, f"ended the process that tried it (exit code {code})"))


def answer_all(answerer: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Answer requests until the other process ends, with the function that `answerer` returns for
    the start."""
    seconds = float(sys.argv[1])
    memory, stack = map(int, sys.argv[2:4])
    source, target = sys.stdin.buffer, sys.stdout.buffer
    answer = answerer(_receive(source))
    # A crash is an answer here; a core file each time would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Measured after the start: what imports and the tokenizer take does not count against a
    # request.
    if size := own_memory()[0]:
        resource.setrlimit(resource.RLIMIT_AS, (size + memory,) * 2)
    # a parent may have left it ignored, or blocked
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    # The main thread's stack is the parent's choice; a thread's can be set, so deep recursion in C
    # ends this process at a known depth.
    threading.stack_size(stack)
    _send(target, None)

    def run() -> None:
        try:
            _send(target, answer(_receive(source)))
        except EOFError:
            os._exit(0)
        # No answer is sent: after a MemoryError the state of a C++ library is unknown.
        except MemoryError:
            os.abort()
        except BaseException:
            os._exit(1)

    while True:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # ends the process, as nothing handles it
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def own_memory() -> tuple[int, int]:
    """Return the bytes of this process's address space, and those resident in memory; 0 if the
    system does not say."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return 0, 0
    size, resident = map(int, file.read_text().split()[:2])
    return size * resource.getpagesize(), resident * resource.getpagesize()


def _send(file: IO[bytes], content: Any) -> None:
    data = json.dumps(content).encode()
    file.write(len(data).to_bytes(8, "big") + data)
    file.flush()


def _receive(file: IO[bytes]) -> Any:
    """The next message. EOFError at the end."""
    size = int.from_bytes(file.read(8), "big")
    if len(content := file.read(size)) < max(size, 1):
        raise EOFError
    return json.loads(content)
