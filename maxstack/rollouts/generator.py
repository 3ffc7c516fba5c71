"""Answers to prompts by the weights of a run in training.

The engine of `maxstack serve` runs on the mesh of training, or, with rollout.tensor and in several
processes, on one of its own, to which the weights move before each rollout. Random numbers belong
to (seed of the prompt, number of the sample, position), so an answer depends neither on the other
requests of a step nor on the number of devices.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxstack import sharding
from maxstack.data.chat import DEFAULT, answer_ends, open_template
from maxstack.data.tokenizers import open_prompt_tokenizer, open_tokenizer
from maxstack.errors import ConfigError
from maxstack.inference.engine import Engine
from maxstack.inference.engine_setup import make_limits
from maxstack.inference.layout import Layout
from maxstack.inference.multi_step import STEPS
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import inference_config
from maxstack.inference.request import Sampling
from maxstack.inference.text import answer_text
from maxstack.inference.tools import FORMATS, ToolFormat, guess_format, marker_tokens
from maxstack.rollouts.sample import Sample
from maxstack.run import assemble
from maxstack.schema.mesh import MeshConfig, parts
from maxstack.schema.rewards import TextReward

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config
    from maxstack.schema.data import DataConfig

REQUESTS, TOKENS = 256, 1 << 17
"""Default of serve.max_requests on each replica: REQUESTS, or more where samples are short, up to
the batched tokens of a step and to TOKENS tokens of all."""


class Cancelled(Exception):
    """The rollout was cancelled."""


class Generator:
    """An engine for the model of a run, which gets new weights for each rollout."""

    def __init__(self, run: "Run", samples: int):
        """`samples`: most answers at a time. ConfigError where not one fits the cache."""
        rollout = run.cfg.rollout
        assert rollout
        self._rollout = rollout
        self.room = rollout.room(run.cfg.train.batch_size, run.cfg.data.seq_len)
        self._run, limits, length = engine_run(run, samples)
        self._several = jax.process_count() > 1
        self._moves = self._run.mesh is not run.mesh
        everywhere = NamedSharding(run.mesh, PartitionSpec())
        # Made once: its programs are then compiled once, not for each rollout.
        self._gather = jax.jit(lambda leaf: leaf, out_shardings=everywhere)
        self.engine = Engine(self._run, None, limits, length)
        tokenizer = open_tokenizer(run.cfg.data.tokenizer)
        self.tokenizer = open_prompt_tokenizer(run.cfg.data.tokenizer)
        self.stops = frozenset(answer_ends(run.cfg.data, tokenizer))
        self.form = _tool_format(run.cfg.data)
        """Format of tool calls in the model's chat template."""
        self._shown = marker_tokens(self.tokenizer, self.form) if self.form else set[int]()
        self._spells = any(
            isinstance(reward, TextReward) and reward.special_tokens for reward in run.cfg.rewards
        )
        self.moved = moved_bytes(run.abstract.params, self._run.abstract.params)
        self.temperature = rollout.temperature

    def load(self, params: Any) -> None:
        """Answer with these weights of the run from now on; None: release them."""
        if params is not None and self._moves:
            params = jax.tree.map(self._move, params, self._run.abstract.params)
        self.engine.load(params)

    def _move(self, leaf: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
        """Move a weight to where the engine has it. Several processes gather it whole, one weight
        at a time, since an engine's mesh has one process's devices alone."""
        if self._several:
            leaf = self._gather(leaf).addressable_data(0)
        return jax.device_put(leaf, wanted.sharding)

    def answer(
        self,
        samples: Iterable[Sample],
        seed: Callable[[Sample], int],
        done: Callable[[Sample], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add an answer to each sample; `done` is called with each as it ends. Cancelled once
        `wanted` returns false."""
        cfg, engine = self._rollout, self.engine
        under_way: dict[int, tuple[Sample, int]] = {}
        sampling = Sampling.of(
            cfg,
            temperature=self.temperature,
            stop_tokens=self.stops,
            logprobs=0,
            scaled=True,
        )
        try:
            for sample in samples:
                left = min(cfg.max_tokens, self.room - len(sample.ids))
                own = dataclasses.replace(
                    sampling, max_tokens=left, seed=seed(sample), choice=sample.number
                )
                under_way[engine.add(sample.ids, own)] = sample, len(sample.ids)
                sample.texts.append("")
            while engine.busy:
                # Between steps of the engine: a program that runs cannot be ended.
                if not wanted():
                    raise Cancelled
                # Several decoding steps in one program, with shared prompts and sampling inside it,
                # made a rollout of 0.52 s one of 0.21 s (EXPERIMENTS.md).
                for output in engine.step(many=STEPS):
                    sample, begin = under_way[output.request]
                    for token in output.tokens:
                        assert token.logprob is not None
                        sample.add_sampled(token.token, token.logprob)
                    if output.finish:
                        del under_way[output.request]
                        sample.finish = output.finish
                        # The token that ended the answer is learned, but is no part of its text.
                        answer = sample.ids[begin : -1 if output.finish == "stop" else None]
                        self.note_answer(sample, sample.ids[:begin], answer)
                        done(sample)
        finally:
            for number in under_way:
                engine.abort(number)

    def note_answer(self, sample: Sample, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Set the text of the last answer, by its tokens without the one that ended it."""
        sample.texts[-1] = answer_text(self.tokenizer, prompt, answer, self._shown)
        if self._spells:
            spelt = {*self.tokenizer.special}
            sample.spelt = answer_text(self.tokenizer, prompt, answer, spelt)

    def prompt_text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt, without special tokens."""
        # A model's vocabulary may be padded beyond that of its tokenizer.
        known = [token for token in ids if token < self.tokenizer.vocab_size]
        return self.tokenizer.decode(np.array(known, np.int32)).decode(errors="replace")


def _tool_format(data: "DataConfig") -> ToolFormat | None:
    """Return the format of tool calls in a run's chat template, if it has one."""
    with contextlib.suppress(ConfigError):  # plain prompts need no template
        name = guess_format(open_template(data).sources[DEFAULT])
        return FORMATS[name] if name else None
    return None


def seed_of(*parts: Any) -> int:
    """Hash the parts into a seed of 64 bits."""
    # Not `hash`, which differs between processes.
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def engine_config(cfg: "Config", samples: int, several: bool = False) -> "Config":
    """Return the engine's configuration for so many samples on each replica; `several`: there are
    several processes, and the engine has one's devices."""
    rollout = cfg.rollout
    assert rollout
    room = rollout.room(cfg.train.batch_size, cfg.data.seq_len)
    changes: dict[str, Any] = {"max_length": room}
    if "max_requests" not in cfg.serve.model_fields_set:
        # Short answers 512 at a time in place of 256: one wave in place of two, 0.45 -> 0.39 to
        # 0.43 s of processor time.
        requests = max(REQUESTS, min(cfg.serve.rows, TOKENS // room))
        changes["max_requests"] = min(samples, requests)
    serve = cfg.serve.model_copy(update=changes)
    mesh = cfg.mesh
    if rollout.tensor is not None or several:
        mesh = MeshConfig(data=-1, tensor=rollout.tensor or 1)
    # A row of the engine is one token, so there is no sequence to split.
    rules = {**mesh.rules, "seq": (), "residual": ()}
    mesh = mesh.model_copy(update={"rules": rules})
    return inference_config(cfg.model_copy(update={"mesh": mesh, "serve": serve}))


def engine_run(
    run: "Run", samples: int, own: Sequence[Any] | None = None
) -> tuple["Run", Limits, int]:
    """Return shapes and programs of the engine, its limits, and the most tokens of a request.
    `own`: the devices of a process where there are several (None: as jax says). ConfigError where
    not one answer fits the cache."""
    if own is None:
        own = jax.local_devices() if jax.process_count() > 1 else ()
    rollout, cfg = run.cfg.rollout, engine_config(run.cfg, samples, bool(own))
    assert rollout
    devices = len(own) or run.mesh.size
    if rollout.tensor and devices % rollout.tensor:
        raise ConfigError(
            f"rollout.tensor={rollout.tensor}: does not divide the {devices} devices that sample; "
            "give a divisor, or null for the mesh of training"
        )
    mesh = run.mesh
    if own:
        # Of this process's devices alone: processes sample different prompts, in different numbers
        # of steps, so they cannot share programs of all devices.
        mesh = sharding.make_mesh(cfg.mesh, own)
    elif rollout.tensor is not None:
        mesh = sharding.make_mesh(cfg.mesh, [*run.mesh.devices.flat])
    # The number of replicas is known only now, and with it how many answers each has at a time.
    replicas = run.mesh.size // mesh.size * parts(cfg.mesh.rules["batch"], mesh.shape)
    cfg = engine_config(run.cfg, -(-samples // replicas), bool(own))
    layout = Layout.of(cfg.decoder, cfg.serve, run.mesh.devices.flat[0].platform)
    room = rollout.room(run.cfg.train.batch_size, run.cfg.data.seq_len)
    limits, length = make_limits(cfg, layout, room, None)
    return assemble(cfg, mesh, trains=False), limits, length


def moved_bytes(ours: Any, theirs: Any) -> int:
    """Count the bytes that reach devices when arrays with the shardings of one tree get those of
    the other, of the same shapes."""
    total = 0
    for leaf, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        size = leaf.dtype.itemsize
        held = leaf.sharding.devices_indices_map(leaf.shape)
        for device, index in other.sharding.devices_indices_map(leaf.shape).items():
            whole = shared = size
            cuts = zip(index, held.get(device, (slice(0, 0),) * leaf.ndim), leaf.shape, strict=True)
            for wanted, own, length in cuts:
                first, last, _ = wanted.indices(length)
                begin, end, _ = own.indices(length)
                whole *= last - first
                # What a device holds already does not move.
                shared *= max(0, min(last, end) - max(first, begin))
            total += whole - shared
    return total
