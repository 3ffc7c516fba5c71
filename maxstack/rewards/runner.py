"""The process that runs rewards and environments: a fork of a worker, which may kill it.

It lives from call to call, so that imports and environments stay. RLIMIT_AS bounds the memory that
a call may add to what the process had; a process that keeps more than that is replaced afterwards.
Random generators are seeded from the content of each call, so values do not depend on which worker
computes them, nor on what it computed before.
"""

import contextlib
import ctypes
import difflib
import hashlib
import inspect
import json
import math
import numbers
import os
import pkgutil
import random
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from maxstack.errors import ConfigError, quoted, shortened
from maxstack.limited import own_memory
from maxstack.rewards.channel import Channel

CLOSED = 75
"""Exit code of a runner whose socket user code closed."""
LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32: rewards reach the devices in that type."""
OF_OTHERS = {
    *("prompts", "completions", "completion_ids", "responses"),
    *("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Parameters of rewards for TRL, which get a batch, and for verl. Some of them would take our three
arguments by position, and misread them."""
ARGUMENTS = {"reset": "row, seed", "step": "text, tool_calls", "": "prompt, completion, row"}
"""Arguments of an environment's methods, and under "" of a reward."""
_GIB = 2**30
_PR_SET_PDEATHSIG = 1


class Session(NamedTuple):
    """An environment and the texts that it has seen."""

    environment: Any
    texts: tuple[str, ...]


class Runner:
    """Answers requests: each is a mapping whose `do` names a method."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._pid, self._folder = os.getpid(), os.getcwd()
        self._request = ""
        """Id of the request being answered."""
        self._calls: dict[str, Any] = {}
        self._sessions: dict[str, Session] = {}
        self._imported = own_memory()[0]
        """Bytes of address space, those that calls added left out."""

    def serve(self) -> NoReturn:
        """Answer until the worker ends."""
        actions = {name: getattr(self, name) for name in ("load", "reward", "turn", "forget")}
        while True:
            request = self._receive()
            self._request = request["id"]
            try:
                answer = actions[request["do"]](request)
                # Tried here, where an answer that JSON cannot hold is the reward's failure.
                json.dumps(answer)
            except BaseException as error:
                answer = {"failure": describe(error, request), "over": True}
                self._sessions.pop(request.get("session", ""), None)
            # A call that keeps its memory would leave less to each call after it: the worker
            # replaces this process.
            grown = own_memory()[0] - self._imported
            self._send(answer | {"grown": grown > request.get("memory", math.inf) * _GIB})

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import a call. ConfigError if it is not there or takes other arguments; `methods`: those
        of an environment, which it must have."""
        call, methods = request["call"], request.get("methods", ())
        module, _, name = call.partition(":")
        try:
            found = self._resolve(call)
        except ModuleNotFoundError as error:
            # Another module is missing, one that this one imports: that error says more.
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"no module {error.name}; {call} is imported from the working folder "
                f"({os.getcwd()}) or from what is installed"
            ) from error
        except AttributeError as error:
            near = difflib.get_close_matches(name, vars(sys.modules.get(module, sys)), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{module} has no {name}{hint}") from error
        if not callable(found):
            raise ConfigError(f"{call} is a {type(found).__name__}, no function")
        if not methods and inspect.isclass(found):
            raise ConfigError(f"{call} is a class; name a function")
        for method in methods:
            if not callable(getattr(found, method, None)):
                raise ConfigError(f"{call} has no method {method}")
            _check_takes(f"{call}.{method}", getattr(found, method), ARGUMENTS[method], "self, ")
        if not methods:
            _check_takes(call, found, ARGUMENTS[""], settings=request.get("settings", {}))
        return {}

    def reward(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compute the reward of a completion."""
        function = self._resolve(request["call"])
        case = request["prompt"], request["completion"], request["row"]
        with self._limits(request, request["call"], request["settings"], *case):
            given = function(*case, **request["settings"])
        return check_reward(given)

    def turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give an environment the last text, or reset it where there is none. One that has not seen
        the texts before (its process was killed) is made anew and replays them all."""
        make, name = self._resolve(request["call"]), request["session"]
        texts = (*request["texts"],)
        about = request["call"], request["seed"], request["row"]
        # Taken out while it plays: where step raises, the session is over.
        session = self._sessions.pop(name, None)
        answer: dict[str, Any] = {}
        if session is None or session.texts != texts[:-1] or not texts:
            with self._limits(request, *about):
                environment = make()
                answer = check_observation(environment.reset(request["row"], request["seed"]))
            session = Session(environment, ())
        for seen in range(len(session.texts) + 1, len(texts) + 1):
            text, tools = texts[seen - 1], request["tools"][seen - 1]
            with self._limits(request, *about, *texts[:seen]):
                given = session.environment.step(text, tools)
            if not isinstance(given, tuple) or len(given) != 3:
                raise TypeError(f"step returned {quoted(given)}, not (observation, reward, done)")
            answer = check_observation(given[0]) | check_reward(given[1]) | {"over": bool(given[2])}
        if not answer.get("over"):
            self._sessions[name] = Session(session.environment, texts)
        return answer

    def forget(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give up a session."""
        self._sessions.pop(request["session"], None)
        return {"over": True}

    def _resolve(self, call: str) -> Any:
        if call not in self._calls:
            before = own_memory()[0]
            self._calls[call] = pkgutil.resolve_name(call)
            # Modules stay in the process and are no call's memory.
            self._imported += own_memory()[0] - before
        return self._calls[call]

    @contextlib.contextmanager
    def _limits(self, request: dict[str, Any], *about: Any) -> Iterator[None]:
        """Report to the worker that a call begins, seed random generators from its arguments and
        bound its memory; afterwards undo an alarm and a change of folder."""
        self._send({"begin": True})
        # Of the call's content: values must not depend on the worker, nor on the calls before.
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()
        random.seed(digest)
        # Only where it is imported; importing it here would cost each runner its time.
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(int.from_bytes(digest[:4], "little"))
        before = resource.getrlimit(resource.RLIMIT_AS)
        # Where /proc tells nothing there is no bound that would not end the process at once.
        if used := own_memory()[0]:
            most = used + int(request["memory"] * _GIB)
            if before[1] != resource.RLIM_INFINITY:
                most = min(most, before[1])
            # The soft limit alone, so that it can be raised again afterwards.
            resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.chdir(self._folder)

    def _receive(self) -> dict[str, Any]:
        try:
            return self._channel.receive()
        except EOFError:
            os._exit(CLOSED)

    def _send(self, message: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a fork that the call made, which returned as well
            os._exit(0)
        try:
            self._channel.send(message | {"id": self._request})
        except EOFError:
            os._exit(CLOSED)


def main(channel: Channel, worker: int) -> NoReturn:
    """Run in a fork of the process `worker`, with stdout and stderr closed. Where memory becomes
    short, the kernel kills this process before others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != worker:  # it ended before it could send a signal
        os._exit(1)
    # A group of its own: a call that kills its group must not reach the worker.
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not every system has it
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    Runner(channel).serve()


def _check_takes(
    call: str,
    function: Any,
    given: str,
    before: str = "",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """ConfigError where a function does not take the `given` arguments."""
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{call} is async; make it a plain function")
    names = f"{before}{given}".split(", ")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not written in Python
        return
    if others := [name for name in signature.parameters if name in OF_OTHERS]:
        raise ConfigError(
            f"{call}{signature}: {others[0]} belongs to another program's rewards; here a function "
            f"is called once for each sample, with ({given})"
        )
    try:
        signature.bind(*names, **settings)
    except TypeError as error:
        raise ConfigError(f"{call}{signature} must take ({given}): {error}") from error


def check_reward(given: Any) -> dict[str, Any]:
    """Return value and components of a reward: a number, or a mapping of names to numbers that are
    summed. TypeError or ValueError for anything else."""
    if not isinstance(given, Mapping):
        return {"value": _finite(given, "returned"), "components": {}}
    for name in given:
        if not isinstance(name, str):
            raise TypeError(
                f"returned a mapping with the key {quoted(name)}, which is not a string"
            )
    if not given:
        raise ValueError("returned a mapping without a component")
    parts = {name: _finite(part, f"returned for {name!r}") for name, part in given.items()}
    return {"value": _finite(math.fsum(parts.values()), "returned, in sum,"), "components": parts}


def check_observation(given: Any) -> dict[str, Any]:
    """Return what an environment shows: text, messages or None. TypeError for anything else."""
    messages = isinstance(given, list) and all(isinstance(item, Mapping) for item in given)
    if given is not None and not isinstance(given, str) and not messages:
        raise TypeError(f"showed {quoted(given)}, not text, a list of messages, or None")
    return {"messages": given}


def describe(error: BaseException, request: Mapping[str, Any]) -> str:
    """Return an exception's type, message and last line of the user's code, in one line."""
    if isinstance(error, ConfigError):
        return str(error)
    try:
        message = shortened(str(error), 300)
    except Exception:  # a __str__ that raises
        message = "without a message"
    if isinstance(error, MemoryError):
        message = f"{message} memory={request.get('memory', math.nan):g} GiB exceeded".strip()
    return f"{type(error).__name__}: {message}{_place(error)}"


def _finite(given: Any, verb: str) -> float:
    if getattr(given, "shape", None) == () and hasattr(given, "item"):  # numpy's or jax's
        given = given.item()
    if not isinstance(given, numbers.Real):
        raise TypeError(f"{verb} {quoted(given)}, which is not a number")
    try:
        value = float(given)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{verb} {quoted(given)}, which is not finite")
    if abs(value) > LARGEST:
        raise ValueError(f"{verb} {quoted(given)}, which float32 cannot hold")
    return value


def _place(error: BaseException) -> str:
    """Return the last line of the user's code in a traceback, else of an installed package."""
    import linecache
    import sysconfig
    import traceback

    own, paths = os.path.dirname(__file__), sysconfig.get_paths()
    packages, standard = (paths["purelib"], paths["platlib"]), (paths["stdlib"], own, "<")
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    installed = [frame for frame in frames if frame[0].startswith(packages)]
    users = [frame for frame in frames if not frame[0].startswith((*packages, *standard))]
    if not (users or installed):
        return ""
    file, line, function = (users or installed)[-1]
    code = shortened(linecache.getline(file, line or 0).strip())
    return f" ({os.path.relpath(file)}:{line}, in {function}: {code})"
