"""Engines that share compiled programs, for tests."""

import copy
import math
import types

import jax

from maxstack import sharding
from maxstack.errors import DataError
from maxstack.inference.adapters import read_adapters
from maxstack.inference.engine import Engine
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import inference_config
from maxstack.inference.scheduler import Scheduler
from maxstack.inference.trained_model import config_of, read_weights
from maxstack.run import assemble
from maxstack.schema.mesh import AXES

SMALL = ("serve.rows=8", "serve.page=4", "serve.max_length=192", "serve.identical=any")
"""Overrides of an engine that compiles few programs."""


class StandIn:
    """What a service asks of an engine but its steps; `tasks` are the requests by number."""

    adapters = ()
    programs = types.SimpleNamespace(close=lambda: None)

    def __init__(self, requests, max_length=1 << 17):
        self.max_length, self.tasks, self.added = max_length, {}, 0
        limits = types.SimpleNamespace(requests=requests)
        self.scheduler = types.SimpleNamespace(limits=limits, pools=[[]], running=[])

    def check(self, prompt):
        if not 0 < len(prompt) < self.max_length:
            raise DataError(f"the prompt is {len(prompt)} tokens long")

    def add(self, prompt, sampling, *_):
        self.added += 1
        self.tasks[self.added] = prompt, sampling
        return self.added

    def abort(self, number):
        self.tasks.pop(number, None)

    @property
    def busy(self):
        return bool(self.tasks)


def build(
    folder, overrides=(), max_length=64, adapters=None, on_demand=None, **limits
) -> tuple[Engine, Limits]:
    """Build an engine of a folder in float32, with 8 batched tokens and pages of 4, and adapters by
    name. Its steps have all 8 rows, unless sizes are tried `on_demand`."""
    cfg, own = config_of(str(folder), ["model.dtype=float32", *overrides])
    cfg = inference_config(cfg)
    devices = jax.devices()[: math.prod(max(1, getattr(cfg.mesh, axis)) for axis in AXES)]
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, devices), trains=False)
    params = read_weights(str(folder), run, own)
    layout = Layout.of(cfg.model, cfg.serve)
    pages, snapshots = (100,) * len(layout.reaches), 16 if layout.recurrent else 0
    sizes = Limits(8, 4, pages, 8, snapshots, snapshot=8)._replace(**limits)
    read = read_adapters(run, params, adapters or {})
    engine = Engine(run, params, sizes, max_length, read, on_demand)
    if on_demand is None:
        engine.programs.sizes = engine.programs.sizes[-1:]
    return engine, sizes


def outputs_of(engine):
    """What comes of all requests, to their end."""
    while engine.busy:
        yield from engine.step()


def compile_bursts(engine, compute):
    """Run `compute(engine)` until the programs of several steps that it needs are compiled, which
    an engine does in the background, where single steps are fast enough for them to pay."""
    engine._fastest = 0
    known = None
    while known != (known := len(engine.programs._compiled)):
        compute(engine)
        for compiled in engine.programs._compiled.values():
            compiled.result()


def finish(engine):
    """Run all requests to their end -> tokens of each by number, and the number of steps."""
    tokens, steps = {}, 0
    while engine.busy:
        steps += 1
        for output in engine.step():
            tokens.setdefault(output.request, []).extend(output.tokens)
    return tokens, steps


def answers(engine, prompts, sampling, adapters=None):
    """Answers to prompts that are computed together, each with its adapter."""
    numbers = [
        engine.add(prompt, sampling, adapter=adapter)
        for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True)
    ]
    tokens, _ = finish(engine)
    return [tokens[number] for number in numbers]


def reset_engine(engine: Engine, limits: Limits) -> Engine:
    """An engine with the weights and compiled programs of another, an empty cache and no request.
    It uses so many slots and pages of that cache as `limits` say, at most those of the other."""
    own = copy.copy(engine)
    own.programs = copy.copy(engine.programs)
    own.programs.cache = own.programs._arrays.make()
    # Weights that it loads are its own.
    own.programs._layers = copy.copy(engine.programs._layers)
    draft = own._drafts if own.cfg.serve.speculate else None
    replicas = own.programs.replicas
    own.scheduler = Scheduler(own._layout, limits, replicas, draft, share_prompts=True)
    own._sequences, own._added, own.drafted, own.accepted = {}, 0, 0, 0
    return own
