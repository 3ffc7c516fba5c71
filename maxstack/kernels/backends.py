"""What the ops have in common: several backends of one meaning, each of which says why it cannot
serve, and one choice among them that is told.

Choosing imports no backend of another platform: Pallas alone takes half a second.
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
from maxstack.config import ConfigError, did_you_mean
from maxstack.kernels import tuning

ALL = ("cpu", "gpu", "tpu")


@dataclasses.dataclass(frozen=True)
class Device:
    """What a program will run on, here or elsewhere."""

    platform: str
    """cpu, gpu or tpu."""
    kind: str
    """jax's device_kind."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability: (9, 0) is Hopper."""

    @classmethod
    def of(cls, device: Any) -> "Device":
        """Of a jax device, or of the description of one."""
        found = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", None)))
        return cls(
            device.platform, device.device_kind, (int(found[1]), int(found[2])) if found else (0, 0)
        )

    @classmethod
    def here(cls) -> "Device":
        """Of the mesh around this place of the program, else jax's default."""
        mesh = sharding.mesh()
        return cls.of(jax.devices()[0] if mesh is None else mesh.devices.flat[0])


def multiplied(dtype: Any) -> Any:
    """The type in which blocks of `dtype` are best multiplied: float32 on a CPU, where XLA would
    convert each block around each product."""
    return jnp.promote_types(dtype, jnp.float32) if Device.here().platform == "cpu" else dtype


class Case(Protocol):
    """One call as its backends see it: what is asked, the shapes of one device, and the device."""

    @property
    def device(self) -> Device:
        """Where it will run."""
        ...

    @property
    def shape_class(self) -> Mapping[str, int | str]:
        """What the best sizes of a kernel's blocks hang on."""
        ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """`module` holds `supports(case) -> str | None`, the reason why it cannot serve the case, and
    `run`, with the arguments of its op."""

    name: str
    module: str
    platforms: tuple[str, ...] = ALL
    refuses: Callable[[Any], str | None] = lambda case: None
    """A reason that needs no look into the module."""

    def supports(self, case: Any) -> str | None:
        """Why this backend cannot serve `case`; None: it can."""
        if case.device.platform not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, and this is a {case.device.platform}"
        return self.refuses(case) or importlib.import_module(self.module).supports(case)

    def candidates(self, case: Any) -> list[dict[str, int]]:
        """Block sizes worth measuring, the default first; none where it has no blocks."""
        return getattr(importlib.import_module(self.module), "candidates", lambda case: [])(case)

    @property
    def run(self) -> Callable[..., Any]:
        """The op's function."""
        return importlib.import_module(self.module).run


@dataclasses.dataclass(frozen=True)
class Op:
    """One public function with one meaning. `auto` takes the first backend that can serve."""

    name: str
    backends: tuple[Backend, ...]

    def __getitem__(self, name: str) -> Backend:
        return next(backend for backend in self.backends if backend.name == name)

    @property
    def names(self) -> list[str]:
        """Of its backends, the preferred first."""
        return [backend.name for backend in self.backends]

    def choose(self, case: Case, asked: str = "auto") -> "Choice":
        """The backend for `case`. ConfigError where the one that was asked for cannot serve, which
        names the key of the part that asks."""
        part = ".".join(_asking.get())
        where = f"{part}.backend" if part else self.name
        if asked != "auto" and asked not in self.names:
            raise ConfigError(
                f"{where}: no backend {asked}{did_you_mean(asked, self.names)}; there "
                f"are auto, {', '.join(self.names)}"
            )
        reasons = {backend.name: backend.supports(case) for backend in self.backends}
        serving = [name for name, reason in reasons.items() if reason is None]
        if asked != "auto" and asked not in serving:
            raise ConfigError(
                f"{where}: backend {asked} cannot serve: {reasons[asked]}; "
                f"{' or '.join(serving)} can, and auto takes {serving[0]}"
            )
        chosen = serving[0] if asked == "auto" else asked
        others = {
            name: reason or _passed_over(asked, chosen)
            for name, reason in reasons.items()
            if name != chosen
        }
        choice = Choice(
            self.name,
            case,
            asked,
            chosen,
            others,
            self._blocks(chosen, case),
            (part,) if part else (),
        )
        if (made := _made.get()) is not None:
            _add(made, choice)
        return choice

    def _blocks(self, name: str, case: Case) -> dict[str, int] | None:
        found = tuning.blocks(self.name, name, case.device.kind, case.shape_class)
        if found and (known := next(iter(self[name].candidates(case)), {})).keys() != found.keys():
            raise ConfigError(
                f"run.tuned: blocks of {self.name} {name} for {dict(case.shape_class)} "
                f"are {', '.join(found)}, and should be "
                f"{', '.join(known) or 'none'}; delete that row, or measure again with "
                "maxstack tune"
            )
        return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend serves an op, and why."""

    op: str
    case: Any
    asked: str
    backend: str
    reasons: dict[str, str]
    """Why each other backend does not."""
    blocks: dict[str, int] | None = None
    """Measured sizes of its blocks; None: its default."""
    parts: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Keys of the parts of the configuration that ask."""

    def __str__(self) -> str:
        sizes = "".join(f" {name}={size}" for name, size in (self.blocks or {}).items())
        pinned = "" if self.asked == "auto" else ", which is pinned"
        of = f" for {', '.join(self.parts)}" if self.parts else ""
        return (
            f"{self.op} by "
            f"{self.backend}{pinned}{f', tuned blocks{sizes}' if sizes else ''}{of}: "
            f"{describe(self.case)}"
        )


_made: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)
_asking: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("asking", default=())


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """The different choices that are made while programs are traced inside, in their order."""
    made: list[Choice] = []
    with sharding.holding(_made, made):
        yield made


def asking(part: str) -> contextlib.AbstractContextManager[None]:
    """Inside, ops are asked for by the part of the configuration that `part` names, within that of
    the `asking` around it."""
    return sharding.holding(_asking, (*_asking.get(), part))


def _add(made: list[Choice], choice: Choice) -> None:
    if choice not in made:
        made.append(choice)
        return
    at = made.index(choice)
    made[at] = dataclasses.replace(
        choice, parts=tuple(dict.fromkeys(made[at].parts + choice.parts))
    )


def describe(case: Any) -> str:
    """What is asked, without the device and what is off: `queries=512, heads=4, ..`."""
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    inner = [(name, value) for name, value in fields.items() if name != "device"]
    nested = [
        pair
        for name, value in inner
        for pair in (vars(value).items() if dataclasses.is_dataclass(value) else [(name, value)])
    ]
    return ", ".join(
        name
        if value is True
        else f"{name}={value:.4g}"
        if isinstance(value, float)
        else f"{name}={value}"
        for name, value in nested
        if value is not None and value is not False and value != 0
    )


def _passed_over(asked: str, chosen: str) -> str:
    return (
        f"could serve; auto prefers {chosen}"
        if asked == "auto"
        else f"could serve; {chosen} is pinned"
    )
