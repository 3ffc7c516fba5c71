"""Capacity of an engine on hardware that need not be here: memory, requests that fit and a bound on
tokens per second.

Everything is computed from shapes, without a compiler: a device's memory less the weights that it
keeps and the arrays of a step leaves room for the cache, of which the engine takes a share; that
over the bytes of a request of some length is how many fit. Tokens per second are the roofline
(roofline.py) of steps of decoding and of prefill. Where not one request fits, the message names the
changes under which one would, each tried by the same computation.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from maxstack.errors import ConfigError
from maxstack.inference.engine_setup import (
    GIB,
    SHARE,
    Opened,
    max_length_of,
    model_files,
    place_on_devices,
)
from maxstack.inference.layout import CacheBytes, Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.roofline import Device, Speed, forward_flops, weights_on_device
from maxstack.inference.runner import OUTPUTS
from maxstack.plan.topology import Topology
from maxstack.report.table import bytes_text, table
from maxstack.schema.mesh import AXES, parts
from maxstack.schema.parts import Dim, weights
from maxstack.schema.rules import sizes_on

if TYPE_CHECKING:
    from maxstack.schema.config import Config

Configured = Callable[[Sequence[str]], "Config"]
"""The configuration of an engine with overrides."""
LENGTHS = 1024, 4096, 16384
"""Default lengths of a request in tokens, prompt and answer together."""
COUNTS = 1, 8, 32, 128
"""Concurrent requests of a replica whose speed is reported, as far as they fit."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device."""

    usable: int
    weights: float
    step: float
    cache: float
    fixed: float
    """Of the cache: snapshots of recurrent states, and slot 0, which stays unused."""

    def requests(self, each: float) -> int:
        """Return how many requests fit in the cache."""
        return max(0, int((self.cache - self.fixed) / each))


@dataclasses.dataclass(frozen=True)
class Row:
    """Requests of one length."""

    length: int
    prompt: int
    """Tokens of the prompt; the others are generated."""
    bytes: float
    """Cache of one request on a device."""
    fit: int
    """Concurrent requests of a replica."""
    decode: dict[int, Speed]
    """By concurrent requests of a replica, as far as they fit."""
    prefill: Speed | None


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Sizes are bytes of one device unless the name says otherwise."""

    model: str
    topology: str
    chip: str
    devices: int
    mesh: dict[str, int]
    replicas: int
    rows: int
    """serve.rows: batched tokens of a replica."""
    requests: int
    """serve.max_requests."""
    parameters: int
    memory: Memory
    token: float
    """Cache of a token that all layers keep."""
    state: float
    """Recurrent states of a request."""
    lengths: tuple[Row, ...]
    balance: float | None
    """Batched tokens whose matmuls take as long as reading the weights; fewer take as long."""

    def json(self) -> dict[str, Any]:
        """Return all fields for JSON."""
        return dataclasses.asdict(self)


def read_bytes(layout: Layout, cache: CacheBytes, start: int, end: int) -> float:
    """Return bytes of the cache that a token reads, on average over positions `start` to `end - 1`;
    states are read and written."""
    total = 0.0
    for reach, size in zip(layout.reaches, cache.reads, strict=True):
        # Summed over positions, because a window or a chunk makes the reach bend; the mean position
        # alone would be wrong for it.
        keys = sum(position - reach.first(position) + 1 for position in range(start, end))
        total += keys / (end - start) * size
    # A state is read and written whole for each token.
    return total + 2 * cache.request


def cache_bytes(cache: CacheBytes, limits: Limits) -> int:
    """Return bytes of the cache on a device, with page 0 and slot 0, which stay unused."""
    pages = sum(
        (1 + count) * limits.page * size
        for count, size in zip(limits.pages, cache.tokens, strict=True)
    )
    # The sizes that `Programs.empty` allocates.
    return round(pages + (1 + limits.requests + limits.snapshots) * cache.request)


def request_bytes(cfg: "Config", layout: Layout, cache: CacheBytes, length: int) -> float:
    """Return bytes of a device that a request of `length` tokens takes."""
    page = cfg.serve.page
    pages = layout.pages(length, page, cfg.serve.rows)
    tokens = sum(count * size for count, size in zip(pages, cache.tokens, strict=True))
    return tokens * page + cache.request


def step_bytes(cfg: "Config", sizes: Mapping[str, int]) -> float:
    """Return a lower bound of the bytes of a step's arrays: logits of the rows that are computed at
    a time, and the outputs of the widest layer."""
    model, rows = cfg.model, cfg.serve.rows
    widest = 0.0
    for block in model.blocks.values():
        outputs = [*weights(block.mixer, Dim("embed", model.embed))]
        outputs += weights(block.mlp, Dim("embed", model.embed))
        widest = max(widest, sum(weight.outputs for _, weight, _ in outputs))
    width = 4 if model.dtype == "float32" else 2
    # Logits are float32 and whole on every device, since the head's outputs are replicated.
    return min(rows, OUTPUTS) * 4 * model.ids + rows * widest * width / sizes["tensor"]


def usable_bytes(topology: Topology) -> int:
    """Return bytes that programs may use on a device. ConfigError where they are unknown."""
    from maxstack.plan.fit import usable

    if topology.chip:
        return topology.chip.for_programs
    size = usable(topology.devices()[0], topology.size)
    if size is None:
        raise ConfigError(
            "--serve: the memory of this machine's devices is unknown; give --topology, such as "
            "h100:1x8"
        )
    return size


def read_config(config: str, overrides: Sequence[str], devices: int) -> tuple["Config", int | None]:
    """Read a file, a preset or a model's configuration for an engine on `devices` devices -> it and
    the most tokens that the model takes, None where unknown."""
    from maxstack.config import storage
    from maxstack.data import hub
    from maxstack.inference.trained_model import config_of
    from maxstack.load import load

    def read(words: Sequence[str]) -> Opened:
        is_file = config.endswith((".yml", ".yaml"))
        named = hub.is_model_name(config) or hub.is_gguf(config)
        if storage.kind(config) == "directory" or (named and not is_file):
            return config_of(config, words)
        return load(config, words), None

    cfg, own = place_on_devices(read, overrides, devices)
    longest = cfg.serve.max_length or cfg.decoder.positions
    if longest is None and (own or cfg.model.weights):
        longest = max_length_of(cfg, own, model_files(cfg, own))
    return cfg, longest


def lengths_of(asked: int | None, prompt: int | None, longest: int | None) -> list[int]:
    """Return the lengths to report; `asked` and `prompt` are those of the command line. ConfigError
    for lengths that no request can have."""
    if asked and longest and asked > longest:
        raise ConfigError(
            f"--length {asked}: the model takes {longest} tokens at most; give fewer, or a larger "
            "serve.max_length"
        )
    usual = [*(length for length in LENGTHS if not longest or length < longest), longest]
    lengths = [asked] if asked else usual
    fitting = [length for length in lengths if length and length > (prompt or 1)]
    if not fitting:
        raise ConfigError(
            f"--prompt {prompt or 1}: leaves no room for an answer in {max(filter(None, lengths))} "
            "tokens; give a smaller one, or a larger --length"
        )
    return fitting


def capacity(
    name: str,
    configured: Configured,
    topology: Topology,
    lengths: Sequence[int],
    prompt: int | None,
) -> Capacity:
    """Return the capacity of an engine for requests of these lengths; `prompt`: tokens of the
    prompt, None: half. ConfigError where not one of the shortest fits, with what would."""
    from maxstack.models.model import weights_of

    cfg = configured(())
    layout = Layout.of(cfg.decoder, cfg.serve, topology.platform)
    sizes = sizes_on(cfg, topology.size, topology.name, trains=False)
    cache, memory = layout.on(cfg.mesh, sizes), _memory(cfg, layout, topology, sizes)
    least = request_bytes(cfg, layout, cache, min(lengths))
    if not memory.requests(least):
        raise ConfigError(_refusal(configured, topology, memory, least, min(lengths)))
    device = Device.of(cfg, topology, sizes)
    rows = []
    for length in lengths:
        given = max(1, length // 2) if prompt is None else prompt
        # Whole pages, as the engine takes them.
        each = request_bytes(cfg, layout, cache, length)
        fit = memory.requests(each)
        row = Row(length, given, each, fit, {}, None)
        if device:
            flops = forward_flops(cfg, given, length)
            read = read_bytes(layout, cache, given, length)
            row.decode.update(
                (count, device.speed(count, flops, count * read))
                # `fit` too, so that the table ends with what the device can do at most.
                for count in sorted({*COUNTS, fit})
                if 0 < count <= fit
            )
            # The cache once a step, not once a token: tokens of one prompt read the same keys
            # together.
            flops, read = forward_flops(cfg, 0, given), read_bytes(layout, cache, 0, given)
            row = dataclasses.replace(row, prefill=device.speed(cfg.serve.rows, flops, read))
        rows.append(row)
    return Capacity(
        model=name,
        topology=topology.name,
        chip=topology.chip.kinds[0] if topology.chip else topology.devices()[0].device_kind,
        devices=topology.size,
        mesh={axis: size for axis, size in sizes.items() if size > 1},
        replicas=parts(cfg.mesh.rules["batch"], sizes),
        rows=cfg.serve.rows,
        requests=cfg.serve.max_requests,
        parameters=sum(leaf.size for leaf in weights_of(cfg.model).values()),
        memory=memory,
        token=sum(cache.tokens),
        state=cache.request,
        lengths=tuple(rows),
        balance=device.balance(forward_flops(cfg, 0, 1)) if device else None,
    )


def _memory(cfg: "Config", layout: Layout, topology: Topology, sizes: Mapping[str, int]) -> Memory:
    """Divide the memory of a device as the engine does. ConfigError where serve.cache is more than
    is left."""
    serve = cfg.serve
    cache = layout.on(cfg.mesh, sizes)
    size = usable_bytes(topology)
    stored = sum(each.kept for each in weights_on_device(cfg, sizes))
    step = step_bytes(cfg, sizes)
    free = max(0.0, size - stored - step)
    taken = free * SHARE
    if serve.cache is not None:
        shards = layout.shards(cfg.mesh, sizes)
        taken = serve.cache * GIB / shards
        # With no free memory at all `capacity` refuses with changes that would help.
        if taken > free > 0:
            raise ConfigError(
                f"serve.cache={serve.cache:g}: a device has {free / GIB:.2f} GiB beside "
                f"{stored / GIB:.2f} of weights and {step / GIB:.2f} of a step, so a replica has "
                f"{free * shards / GIB:.2f}; make it smaller, or leave it out"
            )
    fixed = (1 + layout.snapshots(serve)) * cache.request
    return Memory(size, stored, step, min(taken, free), fixed)


def _refusal(
    configured: Configured, topology: Topology, memory: Memory, least: float, length: int
) -> str:
    """Return the message where no request of `length` tokens fits, with changes that would help."""
    cfg = configured(())
    # A replica on more devices: each holds less of the weights.
    changes = [
        f"mesh.data={topology.size // size} mesh.fsdp=1 mesh.expert=1 mesh.tensor={size}"
        for size in range(2, topology.size + 1)
        if topology.size % size == 0
    ]
    low = "quantization=int8-weights quantization.mode=ptq"
    # The first that fits shards least.
    remedies = [words for words in changes if _fits(configured, topology, length, words)][:1]
    if not cfg.quantization.rules:
        also = [low, *(f"{words} {low}" for words in changes)]
        remedies += [words for words in also if _fits(configured, topology, length, words)][:1]
    # On one device, all bytes are its own; divided by the memory of a device, that is how many it
    # takes.
    ones = dict.fromkeys(AXES, 1)
    layout = Layout.of(cfg.decoder, cfg.serve, topology.platform)
    whole = sum(each.kept for each in weights_on_device(cfg, ones))
    each = request_bytes(cfg, layout, layout.on(cfg.mesh, ones), length) + memory.fixed
    devices = math.ceil((whole + each / SHARE) / (memory.usable - memory.step))
    remedies.append(f"{devices} or more such devices that share the weights (mesh.tensor)")
    return (
        f"--serve: not one request of {length:,} tokens fits {topology.name}: a device has "
        f"{memory.usable / GIB:.2f} GiB, and needs {memory.weights / GIB:.2f} for weights, "
        f"{memory.step / GIB:.2f} for a step and {(least + memory.fixed) / GIB:.2f} of cache, "
        f"which gets {memory.cache / GIB:.2f}; use {', or '.join(remedies)}"
    )


def _fits(configured: Configured, topology: Topology, length: int, words: str) -> bool:
    """Return True where a request fits with these overrides."""
    try:
        cfg = configured(words.split())
        sizes = sizes_on(cfg, topology.size, topology.name, trains=False)
        layout = Layout.of(cfg.decoder, cfg.serve, topology.platform)
        each = request_bytes(cfg, layout, layout.on(cfg.mesh, sizes), length)
        return _memory(cfg, layout, topology, sizes).requests(each) > 0
    # Overrides that do not suit the model are no remedy.
    except ConfigError:
        return False


def text(made: Capacity) -> str:
    """Format a capacity for the terminal."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in made.mesh.items()) or "one device"
    memory = made.memory
    left = memory.usable - memory.weights - memory.step - memory.cache
    rows = [
        ("weights", memory.weights),
        ("step", memory.step),
        ("cache", memory.cache),
        ("left", left),
    ]
    lines = [
        f"{made.model} on {made.topology}: {made.devices:,} x {made.chip}, mesh {mesh}",
        f"{made.parameters:,} parameters; replicas: {made.replicas:,}, each of serve.rows="
        f"{made.rows} tokens a step",
        "",
        f"memory of one device, of {bytes_text(memory.usable)}",
        table("lr", ((name, bytes_text(size)) for name, size in rows)),
        f"a token of the cache takes {bytes_text(made.token)} of it",
        "",
        "requests at a time on each replica, and tokens/s of all replicas at most",
        table("r" * (6 + len(COUNTS)) + "l", *_speeds(made)),
    ]
    if made.balance:
        lines.append(
            "prompts get faster as serve.rows grows, up to "
            f"{made.balance:,.0f}: from there on a step is limited by compute"
        )
    else:
        lines.append("this device has no figures in chips.yml, so its speed has no bound")
    if max(row.fit for row in made.lengths) > min(made.rows, made.requests):
        lines.append(
            f"to run as many as fit, raise serve.rows={made.rows} and "
            f"serve.max_requests={made.requests}"
        )
    return "\n".join(lines)


def _speeds(made: Capacity) -> tuple[Iterable[Sequence[str]], Sequence[str]]:
    """Return the rows of the table, and its header."""
    rows = []
    for row in made.lengths:
        speeds = [row.prefill, *(row.decode.get(count) for count in (*COUNTS, row.fit))]
        cells = [f"{speed.tokens_per_second:,.0f}" if speed else "-" for speed in speeds]
        size = bytes_text(row.bytes)
        last = row.decode.get(row.fit)
        limit = f"limited by {last.limit}" if last else ""
        rows.append((f"{row.prompt:,}", f"{row.length:,}", size, f"{row.fit:,}", *cells, limit))
    decode = (f"decode of {COUNTS[0]}", *(f"of {count}" for count in COUNTS[1:]), "of all", "")
    return rows, ("prompt", "with answer", "cache", "fit", "prefill", *decode)
