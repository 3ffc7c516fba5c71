"""Ops with several backends, and the choice among them.

An op is one function with one meaning. Each backend is a module with `run` and, unless it serves
every case, `supports`, which says why it cannot serve a case. The choice is made while a program is
traced, from the very shapes that one device has, and is recorded on the way (`record_choices`), so
that nothing has to predict those shapes; `maxstack train` traces before it touches a file, so a
pinned backend that cannot serve is an error before anything starts.

Choosing imports no backend of another platform: importing Pallas alone takes half a second.
"""

import contextlib
import contextvars
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from maxstack import sharding
from maxstack.config.spelling import did_you_mean
from maxstack.errors import ConfigError
from maxstack.kernels import tuning

ALL = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to run a program, on this machine or another."""

    platform: str
    """cpu, gpu or tpu."""
    kind: str
    """jax's device_kind."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability: (9, 0) is Hopper."""

    @classmethod
    def of(cls, device: Any) -> "Device":
        """The device of a jax device or a description of one."""
        # jax gives it as text, and for GPUs alone.
        match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", None)))
        capability = (int(match[1]), int(match[2])) if match else (0, 0)
        return cls(device.platform, device.device_kind, capability)

    @classmethod
    def here(cls) -> "Device":
        """The device kind of the current mesh, else jax's default device."""
        mesh = sharding.mesh()
        return cls.of(jax.devices()[0] if mesh is None else mesh.devices.flat[0])


def product_dtype(dtype: Any) -> Any:
    """The dtype in which to multiply blocks of `dtype`: float32 on a CPU, where XLA would otherwise
    convert each block around each product."""
    # The reference step in bfloat16, in processor seconds: 1.55 -> 1.49.
    return jnp.promote_types(dtype, jnp.float32) if Device.here().platform == "cpu" else dtype


def size_of(*arrays: Any) -> int:
    """Size of arrays or shapes in bytes."""
    return sum(x.size * x.dtype.itemsize for x in arrays)


class Case(Protocol):
    """A call of an op, for its backends to accept or refuse: the request, the shapes on one device,
    and the device."""

    @property
    def device(self) -> Device:
        """The device that runs the call."""
        ...

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """The key of tuned block sizes."""
        ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """An implementation of an op.

    `module` holds `run`, with the arguments of its op, and can hold `supports(case) -> str | None`,
    the reason why it cannot serve the case, and `candidates(case)`.
    """

    name: str
    module: str
    platforms: tuple[str, ...] = ALL
    refuses: Callable[[Any], str | None] | None = None
    """A reason that is known without importing the module."""

    def supports(self, case: Any) -> str | None:
        """Why this backend cannot serve `case`; None if it can."""
        # Before anything that imports the module.
        if case.device.platform not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, and this is a {case.device.platform}"
        if self.refuses and (reason := self.refuses(case)):
            return reason
        return self._of_module("supports", lambda case: None)(case)

    def candidates(self, case: Any) -> list[dict[str, int]]:
        """Block sizes to measure, the default first; none if the backend has no blocks."""
        return self._of_module("candidates", lambda case: [])(case)

    @property
    def run(self) -> Callable[..., Any]:
        """The op's function."""
        return importlib.import_module(self.module).run

    def _of_module(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return getattr(importlib.import_module(self.module), name, default)


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation and its backends. `auto` takes the first backend that can serve."""

    name: str
    backends: tuple[Backend, ...]

    def __getitem__(self, name: str) -> Backend:
        return next(backend for backend in self.backends if backend.name == name)

    @property
    def names(self) -> list[str]:
        """Names of the backends, the preferred first."""
        return [backend.name for backend in self.backends]

    def choose(self, case: Case, asked: str = "auto") -> "Choice":
        """The backend for `case`. ConfigError, which names the key of the configuration in scope,
        if the requested backend cannot serve."""
        part = ".".join(_scope.get())
        where = f"{part}.backend" if part else self.name
        if asked not in ("auto", *self.names):
            raise ConfigError(
                f"{where}: no backend {asked}{did_you_mean(asked, self.names)}; there "
                f"are auto, {', '.join(self.names)}"
            )
        # All are asked, also after one that serves, since `maxstack kernels` prints every reason.
        refusals = {backend.name: backend.supports(case) for backend in self.backends}
        serving = [name for name, reason in refusals.items() if reason is None]
        # An error, never another backend: a pinned one is
        # what a measurement or a bit-exact resume rests on.
        if asked != "auto" and asked not in serving:
            raise ConfigError(
                f"{where}: backend {asked} cannot serve: {refusals[asked]}; "
                f"{' or '.join(serving)} can, and auto takes {serving[0]}"
            )
        chosen = serving[0] if asked == "auto" else asked
        passed_over = f"auto prefers {chosen}" if asked == "auto" else f"{chosen} is pinned"
        del refusals[chosen]
        reasons = {
            name: reason or f"could serve; {passed_over}" for name, reason in refusals.items()
        }
        blocks = self._blocks(chosen, case)
        choice = Choice(self.name, case, asked, chosen, reasons, blocks, (part,) if part else ())
        # Recorded as programs are traced, with the shapes that they have there.
        if (choices := _choices.get()) is not None:
            _add(choices, choice)
        return choice

    def _blocks(self, name: str, case: Case) -> dict[str, int] | None:
        """Tuned block sizes; ConfigError if they are not the sizes that the backend has."""
        tuned = tuning.blocks(self.name, name, case.device.kind, case.shape_class)
        if tuned is None:
            return None
        default = next(iter(self[name].candidates(case)), {})
        # A table of another version of the kernel.
        if default.keys() != tuned.keys():
            raise ConfigError(
                f"run.tuned: blocks of {self.name} {name} for {dict(case.shape_class)} "
                f"are {', '.join(tuned)}, and should be "
                f"{', '.join(default) or 'none'}; delete that row, or measure again with "
                "maxstack tune"
            )
        return tuned


@dataclasses.dataclass(frozen=True)
class Choice:
    """The backend that serves a case, and why it does."""

    op: str
    case: Any
    asked: str
    backend: str
    reasons: dict[str, str]
    """Why each other backend does not serve."""
    blocks: dict[str, int] | None = None
    """Measured block sizes; None for the backend's default."""
    parts: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Keys of the parts of the configuration that the choice is for."""

    def __str__(self) -> str:
        pinned = "" if self.asked == "auto" else ", which is pinned"
        sizes = "".join(f" {name}={size}" for name, size in (self.blocks or {}).items())
        tuned = f", tuned blocks{sizes}" if sizes else ""
        parts = f" for {', '.join(self.parts)}" if self.parts else ""
        return f"{self.op} by {self.backend}{pinned}{tuned}{parts}: {describe(self.case)}"


_choices: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)
_scope: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("scope", default=())


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Record the distinct choices made while programs are traced inside, in order."""
    choices: list[Choice] = []
    with sharding.holding(_choices, choices):
        yield choices


@contextlib.contextmanager
def config_scope(part: str) -> Iterator[None]:
    """Attribute operations traced inside to a part of the configuration, relative to the
    surrounding `config_scope`, in recorded choices and in profiles. A named scope costs nothing at
    run time."""
    with sharding.holding(_scope, (*_scope.get(), part)), jax.named_scope(part):
        yield


def _add(choices: list[Choice], choice: Choice) -> None:
    """Append a choice, or add its parts to an equal one."""
    if choice not in choices:
        choices.append(choice)
        return
    i = choices.index(choice)
    parts = dict.fromkeys(choices[i].parts + choice.parts)
    choices[i] = dataclasses.replace(choices[i], parts=tuple(parts))


def describe(case: Any) -> str:
    """The request and shapes of a case, without the device and settings that are off:
    `queries=512, heads=4, ..`."""
    values = dict(vars(case))
    del values["device"]
    if request := values.pop("request", None):
        values = vars(request) | values
    return ", ".join(_setting(name, value) for name, value in values.items() if value)


def _setting(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
