"""Compiler options of a run's programs, its cache of compiled programs, and errors for unknown
flags.

Options go to the compilation of each program and not into $XLA_FLAGS: plan compiles with them too,
and a flag that this XLA does not know is reported by name instead of ending the process."""

import contextlib
import functools
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jaxlib
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxstack.config import trust
from maxstack.errors import ConfigError
from maxstack.schema.config import RunConfig

if TYPE_CHECKING:
    from maxstack.schema.config import Config

log = logging.getLogger(__name__)
_EFFORT = "xla_backend_optimization_level"
# Reference step at levels 3, 2 and 1: compiled in 3.65, 3.2 and 3.05 s, run in 511, 510 and 519 ms.
# Level 0 gives initial weights other bits.
QUICK = {_EFFORT: 2}
"""On a CPU, a step runs as fast as at the default 3 and compiles sooner; the program of initial
weights compiles in a third of the time."""
IN_ORDER = "xla_cpu_enable_concurrency_optimized_scheduler"
"""XLA's flag that lets CPU devices start independent collectives at once. Each then holds a thread
of a pool that all devices share; when threads run out, all wait until XLA aborts the process."""
SCHEDULER = "xla_cpu_scheduler_type"
_REFUSED = re.compile(
    r"No such compile option: '(\w+)'|While setting option (\w+), ('.*?') is not a valid (\w+)"
)


def keep_programs(folder: str | None, named: bool = False) -> None:
    """Cache compiled programs in `folder` for the next start. `named`: reuse a program only if the
    names and lines of its source, which a profile shows, are the same too. ConfigError if others
    may write to the default folder; any other folder is the user's choice."""
    # A compiled program is code. The default folder may be one that somebody else made first.
    if folder and folder == RunConfig.model_fields["compilation_cache"].default:
        try:
            trust.private(Path(folder).expanduser())
        except OSError as error:
            log.warning("%s: cannot be created: %s; programs are not kept", folder, error.strerror)
            return
    if folder:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", named)
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(folder))
        # jax keeps only programs that took a second or more; a start compiles many smaller ones.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compile inside without the cache of `keep_programs`. A CPU program that was read from the
    cache cannot be saved again, and the compiler does not say so."""
    before = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # type: ignore[no-untyped-call]  # it keeps its answer
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()  # type: ignore[no-untyped-call]


def flags_for(cfg: "Config", platform: str) -> dict[str, Any]:
    """Return the configuration's compiler flags; none if they are for another platform."""
    return dict(cfg.xla.flags) if cfg.xla.platform in (None, platform) else {}


def options_for(cfg: "Config", mesh: Mesh) -> dict[str, Any]:
    """Return the step's compiler options: `in_order` and on a CPU `QUICK`, unless the configuration
    or $XLA_FLAGS says otherwise."""
    # An effort that the user names in the environment stays.
    ours = in_order(mesh) if _EFFORT in os.environ.get("XLA_FLAGS", "") else quickly(mesh)
    return ours | flags_for(cfg, mesh.devices.flat[0].platform)


def in_order(mesh: Mesh) -> dict[str, Any]:
    """Return options that make the devices of a CPU mesh run one collective after the other."""
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    told = (
        "several collectives at once on CPU devices may wait for each other until XLA ends the "
        "process"
    )
    return {IN_ORDER: False} if several and _knows(IN_ORDER, False, told) else {}


def quickly(mesh: Mesh) -> dict[str, Any]:
    """Return `in_order`, and on a CPU `QUICK`."""
    here = mesh.devices.flat[0].platform == "cpu"
    return in_order(mesh) | (QUICK if here else {})


def sparing(mesh: Mesh) -> dict[str, Any]:
    """Return options that make a CPU compute each intermediate array just before it is used, while
    it is in the caches, instead of as early as possible."""
    value = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    told = "long prompts take more time and memory"
    here = mesh.devices.flat[0].platform == "cpu"
    return {SCHEDULER: value} if here and _knows(SCHEDULER, value, told) else {}


@functools.cache
def _knows(option: str, value: Any, told: str) -> bool:
    """Return False and warn of the consequence if the compiler lacks an option."""
    try:
        # XLA has no list of its options; compiling a program of nothing is the way to ask.
        jax.jit(lambda: 0, compiler_options={option: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        # Another error is not about the option and must not be hidden.
        if not _REFUSED.search(str(error)):
            raise
        warnings.warn(f"jaxlib {jaxlib.__version__} has no {option}: {told}", stacklevel=3)
        return False
    return True


def check_flags(cfg: "Config", mesh: Mesh) -> None:
    """ConfigError for a flag that the compiler does not know, found by compiling a tiny program."""
    if flags := flags_for(cfg, mesh.devices.flat[0].platform):
        number = jax.ShapeDtypeStruct(
            (), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
        )
        compiled(jax.jit(lambda x: x + 1, compiler_options=flags).lower(number), mesh)


def compiled(lowered: Any, mesh: Mesh, options: Mapping[str, Any] | None = None) -> Any:
    """Compile a lowered program with `options` beside its own. ConfigError for a flag that the
    compiler does not know."""
    try:
        return lowered.compile(compiler_options={**options} if options else None)
    except jax.errors.JaxRuntimeError as error:
        if not (refusal := _REFUSED.search(str(error))):
            raise
        unknown, flag, value, type_ = refusal.groups()
        kind = mesh.devices.flat[0].device_kind
        wrong = f"{value} is not a valid {type_}" if flag else "there is no such flag"
        raise ConfigError(
            f"xla.flags.{unknown or flag}: {wrong}, says the compiler of jaxlib "
            f"{jaxlib.__version__} for {kind}; correct it or remove it"
        ) from error
