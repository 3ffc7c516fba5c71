"""Memory and least times of a run's rollouts, by sums over shapes: the engine's part of `maxstack
plan`.

The engine's replicas share a rollout's answers. Its time is at least that of all prompts (each once
where samples share its pages), then of the answers in waves, as many at a time as requests and
batched tokens allow: a token of each in a step, which is bound by compute, weights or cache
(inference/roofline.py). Several steps of a rollout add forward passes for the log-probabilities
before them, and weights that move to the engine's mesh their time on the link between.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from maxstack.errors import ConfigError
from maxstack.inference import capacity
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import convert_layer, original_paths, prepare_weights
from maxstack.inference.roofline import Device, Speed, forward_flops
from maxstack.plan.fit import shard_bytes
from maxstack.plan.rollout import Least, Rollout, phases
from maxstack.plan.topology import Topology, groups
from maxstack.rollouts.generator import engine_run, moved_bytes
from maxstack.schema.mesh import parts
from maxstack.state import count, flat
from maxstack.weights.cpu_matrix import with_cpu_matrices

if TYPE_CHECKING:
    from maxstack.plan.report import Plan
    from maxstack.run import Run
    from maxstack.schema.config import Config


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Assumed tokens of a sample."""

    prompt: int
    answer: int

    @classmethod
    def of(cls, cfg: "Config", length: int | None, prompt: int | None) -> "Lengths":
        """Take those of the command line, by default the most that a sample can have. ConfigError
        for samples that the run cannot have."""
        rollout = cfg.rollout
        assert rollout
        room = rollout.room(cfg.train.batch_size, cfg.data.seq_len)
        most = rollout.max_tokens * (rollout.environment.turns if rollout.environment else 1)
        if length is None:
            length = room if prompt is None else min(room, prompt + rollout.max_tokens)
        given = max(1, length - rollout.max_tokens) if prompt is None else prompt
        if length > room:
            raise ConfigError(f"--length {length}: a sample of this run has {room} tokens at most")
        if not 0 < length - given <= most:
            raise ConfigError(
                f"--length {length} --prompt {given}: leave {length - given} tokens for the "
                f"answer, and rollout.max_tokens allows 1 to {most}"
            )
        return cls(given, length - given)


def with_rollouts(plan: "Plan", run: "Run", topology: Topology, lengths: Lengths) -> "Plan":
    """Extend the plan of a step by that of the rollouts that it learns from."""
    rollout = run.cfg.rollout
    assert rollout
    own = _own_devices(run, topology)
    engine, limits, _ = engine_run(run, rollout.prompts * rollout.samples, own)
    cfg, sizes = engine.cfg, dict(engine.mesh.shape)
    layout = Layout.of(cfg.decoder, cfg.serve, topology.platform)
    in_update, in_rollout = _memory(run, engine, layout, limits)
    device = Device.of(cfg, _of_engine(topology, engine), sizes)
    engines = run.mesh.size // engine.mesh.size
    # Processes have an engine each, and within one every part of the batch axes samples by itself.
    replicas = engines * parts(cfg.mesh.rules["batch"], sizes)
    answers = math.ceil(rollout.prompts * rollout.samples * rollout.on_policy / replicas)
    sampling: dict[str, Least] = {}
    learning: dict[str, Least] = {}
    if device:
        times = _Times(cfg, layout, limits, device, lengths)
        moved = moved_bytes(run.abstract.params, engine.abstract.params)
        sampling = {
            **_time_to_move(moved / engine.mesh.size, topology, run.mesh.shape),
            "prompts": times.prompts(
                rollout.prompts * rollout.on_policy / replicas, rollout.samples
            ),
            "answers": times.answers(answers),
        }
    if plan.roofline:
        update = Least(rollout.steps * plan.roofline.seconds, plan.roofline.limit)
        learning = {**_before(run, topology), "update": update}
    planned = Rollout(
        prompts=rollout.prompts,
        samples=rollout.samples,
        prompt=lengths.prompt,
        answer=lengths.answer,
        requests=min(answers, limits.requests),
        replicas=replicas,
        steps=rollout.steps,
        number=run.cfg.train.steps / rollout.steps,
        in_update=in_update,
        in_rollout=in_rollout,
        sampling=sampling,
        learning=learning,
    )
    # Updates and rollouts take turns, so memory is the larger of the two, not their sum; with
    # rollout.ahead on one device `_memory` counts both in each.
    beside = plan.needed + sum(in_update.values())
    sampled = sum(phases(plan.memory, planned)["rollout"].values())
    return dataclasses.replace(plan, rollout=planned, needed=max(beside, sampled))


def _own_devices(run: "Run", topology: Topology) -> list[Any]:
    """Return the devices of the first process, where a real run has one on each host; none where
    one process drives all."""
    devices = [*run.mesh.devices.flat]
    own = [device for device in devices if device.process_index == devices[0].process_index]
    alone = topology.name == "here" or run.cfg.runtime == "pathways" or len(own) == len(devices)
    return [] if alone else own


def _of_engine(topology: Topology, engine: "Run") -> Topology:
    """Return the hardware of one engine: all of it, or that of a process."""
    if engine.mesh.size == topology.size:
        return topology
    chips = engine.mesh.size // (topology.chip.devices if topology.chip else 1)
    sides = (1,) * (len(topology.sides) - 1) + (chips,)
    return dataclasses.replace(topology, sides=sides, slices=1)


def cache_bytes(run: "Run") -> dict[str, int]:
    """Return the bytes of one device that a run's engine takes for its cache from its start on."""
    rollout = run.cfg.rollout
    if not rollout:
        return {}
    engine, limits, _ = engine_run(run, rollout.prompts * rollout.samples)
    platform = run.mesh.devices.flat[0].platform
    layout = Layout.of(engine.cfg.decoder, engine.cfg.serve, platform)
    return {"cache": _cache(engine, layout, limits)}


def _cache(engine: "Run", layout: Layout, limits: Limits) -> int:
    return capacity.cache_bytes(layout.on(engine.cfg.mesh, engine.mesh.shape), limits)


def _memory(
    run: "Run", engine: "Run", layout: Layout, limits: Limits
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the engine's bytes on one device by part, during an update and during a rollout."""
    rollout = run.cfg.rollout
    assert rollout
    cache = {"cache": _cache(engine, layout, limits)}
    step = round(capacity.step_bytes(engine.cfg, dict(engine.mesh.shape)))
    works = {"engine's weights": copied_bytes(engine), "engine's step": step}
    whole = shard_bytes(run.abstract.params)
    if rollout.ahead and run.mesh.size == 1:  # beside training, whose step donates the weights
        held = {**cache, **works, "copies for it": rollout.ahead * whole}
        return held, held | {"copies for it": (1 + rollout.ahead) * whole}
    if engine.mesh.size < run.mesh.size:  # every device has all of them on the way
        moved = count(run.abstract.params)[1] + shard_bytes(engine.abstract.params)
    else:
        moved = _count_moved(run.abstract.params, engine.abstract.params)
    return cache, {**cache, **works, "weights moved to it": moved}


def copied_bytes(engine: "Run") -> int:
    """Return the bytes of one device for weights that the engine converts before it reads them."""
    state, cfg = engine.weights.rewrite.state, engine.cfg
    makers = {}
    if engine.mesh.size == 1 and engine.mesh.devices.flat[0].platform == "cpu":
        matrices = with_cpu_matrices(engine.graph, state)[1]
        makers = {
            path: functools.partial(convert_layer, matrix) for path, matrix in matrices.items()
        }
    params, original = engine.abstract.params, original_paths(engine)
    read = functools.partial(
        prepare_weights, state, makers=makers, original=original, dtype=cfg.model.dtype, keep=True
    )
    # By shapes: nothing is allocated, and what the engine really does is followed, not reckoned
    # again.
    made = flat(jax.eval_shape(read, params))
    total = 0
    for path, leaf in flat(params).items():
        kept = made[f"{path}/kept" if path in makers else path]
        if isinstance(kept, tuple) or path in makers or kept.dtype != leaf.dtype:
            size = sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(kept))
            total += size * math.prod(leaf.sharding.shard_shape(leaf.shape)) // leaf.size
    return total


def _count_moved(ours: Any, theirs: Any) -> int:
    """Return the bytes on one device of arrays of the second tree that are sharded differently from
    the first."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return sum(
        shard_bytes(other)
        for leaf, other in pairs
        if not leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    )


def _time_to_move(moved: float, topology: Topology, sizes: Mapping[str, int]) -> dict[str, Least]:
    """Return the time for so many bytes of weights to reach each device of the engine."""
    axes = tuple(axis for axis, size in sizes.items() if size > 1)
    if not (moved and axes):
        return {}
    link = groups(topology, tuple(sizes.values()))(axes)
    seconds = moved / link.bandwidth if link.bandwidth else 0.0
    return {"weights to the engine": Least(seconds, link.kind)}


def _before(run: "Run", topology: Topology) -> dict[str, Least]:
    """Return the time of the forward passes for log-probabilities that several steps of a rollout
    compare with."""
    rollout, wanted = run.cfg.rollout, run.objective.annotations
    assert rollout
    if not wanted:
        return {}
    sizes = dict(run.mesh.shape)
    tokens = rollout.minibatches * run.cfg.train.batch_size * run.cfg.data.seq_len
    room = rollout.room(run.cfg.train.batch_size, run.cfg.data.seq_len)
    room = min(room, run.cfg.data.seq_len)
    models = [run]
    if "reference_logps" in wanted:
        models.append(run)
    if "teacher_logps" in wanted:
        models.append(run.others["teacher"])
    seconds = 0.0
    for each in models:
        device = Device.of(each.cfg, topology, sizes)
        flops = forward_flops(each.cfg, 0, room)
        seconds += device.compute(flops) * tokens / device.replicas if device else 0.0
    return {"log-probabilities before": Least(seconds, "compute")}


@dataclasses.dataclass(frozen=True)
class _Times:
    """Lower bounds of the engine's times on one replica."""

    cfg: "Config"
    layout: Layout
    limits: Limits
    device: Device
    lengths: Lengths

    def prompts(self, number: float, samples: int) -> Least:
        """Bound the time for so many prompts: each once, where its samples share its pages."""
        times = 1 if self.limits.prefix_cache else samples
        rows = self.limits.rows
        tokens = number * times * self.lengths.prompt
        speed = self._speed(0, self.lengths.prompt, rows, 1)
        # At least one step, however few prompts there are.
        return Least(max(1.0, tokens / rows) * speed.seconds, speed.limit)

    def answers(self, number: int) -> Least:
        """Bound the time for so many answers, as many at a time as requests and batched tokens
        allow: a token of each in a step, or more where all drafts are accepted."""
        # A bound: all drafts are accepted.
        guessed = 1 + self.cfg.serve.speculate
        lengths = self.lengths
        most = max(1, min(number, self.limits.requests, self.limits.rows // guessed))
        steps = max(lengths.answer - 1, 1) / guessed  # the prompt's last row gives the first token
        # Full waves, and one of what is left: a step of fewer answers is faster, but not in
        # proportion.
        waves = [most] * (number // most)
        if number % most:
            waves.append(number % most)
        speeds = [
            self._speed(lengths.prompt, lengths.prompt + lengths.answer, wave * guessed, wave)
            for wave in waves
        ]
        return Least(steps * sum(speed.seconds for speed in speeds), speeds[0].limit)

    def _speed(self, start: int, end: int, rows: int, requests: int) -> Speed:
        """Bound a step of so many tokens at positions `start` to `end - 1` on average, which reads
        the cache of so many requests."""
        cache = self.layout.on(self.cfg.mesh, self.device.sizes)
        read = capacity.read_bytes(self.layout, cache, start, end)
        return self.device.speed(rows, forward_flops(self.cfg, start, end), requests * read)
