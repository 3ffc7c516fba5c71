"""Engines that share compiled programs, for tests."""

import copy

from maxstack.inference.engine import Engine
from maxstack.inference.page_cache import Limits
from maxstack.inference.scheduler import Scheduler

SMALL = ("serve.rows=8", "serve.page=4", "serve.max_length=192", "serve.identical=any")
"""Overrides of an engine that compiles few programs."""


def fresh(engine: Engine, limits: Limits) -> Engine:
    """An engine with the weights and compiled programs of another, an empty cache and no request.
    It uses so many slots and pages of that cache as `limits` say, at most those of the other."""
    own = copy.copy(engine)
    own.programs = copy.copy(engine.programs)
    own.programs.cache = None
    own.programs.load(None)
    own.programs._params = engine.programs._params
    draft = own._drafts if own.cfg.serve.speculate else None
    replicas = own.programs.replicas
    own.scheduler = Scheduler(own._layout, limits, replicas, draft, share_prompts=True)
    own._sequences, own._added, own.drafted, own.accepted = {}, 0, 0, 0
    return own
