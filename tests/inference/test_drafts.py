"""Guesses by modules of multi-token prediction: those of training's forward pass, and answers as
without them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny
from engines import finish, reset_engine
from flax import nnx

from maxstack import sharding
from maxstack.errors import ConfigError
from maxstack.inference.engine import Engine
from maxstack.inference.layout import Layout
from maxstack.inference.page_cache import Limits
from maxstack.inference.programs import inference_config
from maxstack.inference.request import Sampling
from maxstack.models.model import initial
from maxstack.run import assemble
from maxstack.schema.mesh import AXES

GREEDY = Sampling(max_tokens=24, temperature=0.0)
PROMPTS = [[7, 3, 9, 200, 31, 8, 77, 5, 6, 1, 90], [4, 5], [300] * 5, [11, 12, 13]]
MLA = {"kind": "mla", "heads": 4, "kv_lora": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}
MIXERS = {"keys and values": None, "latents": MLA}
MESH = (("tensor", 2), ("data", 2))
SETTINGS = {"greedy": GREEDY, "sampled": dataclasses.replace(GREEDY, temperature=0.7, seed=3)}


@functools.cache
def built(speculate, depth, mesh, mixer):
    """An engine of a tiny model, which others share the programs of, its limits and weights."""
    block = tiny.model()["blocks"]["global"]
    blocks = {"block": block | {"mixer": MIXERS[mixer] or block["mixer"]}}
    layers = {"layers": 1, "pattern": ["block"], "blocks": blocks}
    model = tiny.model(**layers, mtp={"block": "block", "depth": depth})
    serve = {"speculate": speculate, "draft": "mtp", "rows": 8, "page": 4}
    sizes = dict.fromkeys(AXES, 1) | dict(mesh)
    rules = {"seq": (), "residual": ()}
    cfg = inference_config(tiny.config(model=model, serve=serve, mesh=sizes | {"rules": rules}))
    devices = jax.devices()[: np.prod([*sizes.values()])]
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, devices), trains=False)
    params = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding), initial(cfg.model, 0), run.abstract.params
    )
    pages = (60,) * len(Layout.of(cfg.model, cfg.serve).reaches)
    limits = Limits(rows=8, page=4, pages=pages, requests=4)
    engine = Engine(run, None, limits, 64)
    engine.load(params)
    engine.programs.sizes = engine.programs.sizes[-1:]
    return engine, limits, params


def engine_of(speculate, depth=1, bigram=False, mesh=(), mixer="keys and values", **limits):
    """An engine with random weights, or with those of a bigram: nothing but the last token counts,
    and each module knows it, so that its guesses are right."""
    engine, most, params = built(speculate, depth, mesh, mixer)
    own = reset_engine(engine, most._replace(**limits))
    if bigram:
        params = nnx.traversals.flatten_mapping(params)
        for path in params:
            if path[-1] in ("out", "down"):
                params[path] = params[path] * 0
            if path[0] == "mtp" and path[-1] == "project":
                params[path] = params[path].at[:].set(0).at[0].set(np.eye(engine.cfg.model.embed))
        own.load(nnx.traversals.unflatten_mapping(params))
    return own


def answers(engine, prompts, sampling):
    """Tokens of each answer, and the number of steps."""
    numbers = [engine.add(prompt, sampling) for prompt in prompts]
    made, steps = finish(engine)
    return [[token.token for token in made[number]] for number in numbers], steps


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.slow
def test_a_guess_is_what_training_predicts_from_the_same_tokens(mixer):
    engine = engine_of(1, mixer=mixer)
    graph, weights = engine.programs._run.graph, nnx.State(initial(engine.cfg.model, 0))

    @jax.jit
    def predicted(tokens, last):
        """The likeliest token after the next, at a place that sees nothing behind it."""
        model = nnx.merge(graph, weights)
        x, _, context = model.trunk({"tokens": tokens[:, :-1]})
        x, _ = model.mtp["0"](x, model.embed_tokens(tokens[:, 1:]), context)
        return model.logits(model.mtp["0"].norm(x))[0, last].argmax()

    number, compared = engine.add(PROMPTS[0], GREEDY), 0
    engine.add(PROMPTS[1], GREEDY)
    while sequence := engine.sequence(number):
        engine.step()
        if not sequence.drafts:
            continue
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(sequence.tokens)] = sequence.tokens
        assert sequence.drafts == [predicted(tokens, len(sequence.tokens) - 2)]
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow
def test_guesses_that_are_right_save_steps_and_change_no_answer(name, depth):
    plain, long = answers(engine_of(0, depth, True), PROMPTS, SETTINGS[name])
    engine = engine_of(depth, depth, True)
    made, steps = answers(engine, PROMPTS, SETTINGS[name])
    assert made == plain and engine.accepted > 0.8 * engine.drafted > 0
    assert steps < 0.8 * long


@pytest.mark.parametrize("name", SETTINGS)
def test_guesses_that_are_wrong_change_no_answer(name):
    plain, _ = answers(engine_of(0), PROMPTS, SETTINGS[name])
    engine = engine_of(1)
    assert answers(engine, PROMPTS, SETTINGS[name])[0] == plain
    assert engine.drafted > engine.accepted


def test_answers_with_guesses_are_the_same_alone_preempted_and_after_a_prefix_hit():
    sampling = dataclasses.replace(SETTINGS["sampled"], logprobs=2)
    roomy = engine_of(1, bigram=True)
    alone = [answers(roomy, [prompt], sampling)[0][0] for prompt in PROMPTS]
    assert answers(roomy, PROMPTS, sampling)[0] == alone
    assert roomy.scheduler.hits > 0
    tight = engine_of(1, bigram=True, pages=(14,) * len(roomy.scheduler.pools[0]))
    assert answers(tight, PROMPTS, sampling)[0] == alone
    assert tight.scheduler.preemptions > 0


@pytest.mark.slow
def test_a_mesh_of_devices_guesses_as_one_device_does():
    whole, split = (engine_of(1, bigram=True, mesh=mesh) for mesh in ((), MESH))
    assert answers(split, PROMPTS, GREEDY)[0] == answers(whole, PROMPTS, GREEDY)[0]
    assert split.accepted > 0


def test_more_guesses_than_modules_are_refused():
    with pytest.raises(ConfigError, match="the model has 1; use serve.speculate=1"):
        engine_of(2)
