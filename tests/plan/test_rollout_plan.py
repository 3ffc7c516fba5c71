"""`maxstack plan` of runs with rollouts: the memory that a real run takes, and bounds on time."""

import json

import jax
import pytest
import tiny
from plans import plan

from maxstack import sharding
from maxstack.errors import ConfigError
from maxstack.inference.capacity import read_bytes
from maxstack.inference.layout import Layout
from maxstack.inference.roofline import Device, forward_flops
from maxstack.plan import fit, topology
from maxstack.plan.roofline import Roofline
from maxstack.rollouts import capacity
from maxstack.rollouts.capacity import Lengths
from maxstack.rollouts.generator import Generator, engine_config
from maxstack.run import assemble

SPLIT = {"data": 2, "fsdp": 2, "tensor": 2}
RUNS = {
    "split": ({"mesh": SPLIT}, 8),
    "the engine's own mesh": ({"mesh": SPLIT, "rollout": {"tensor": 1}}, 8),
    "ahead, in several steps": ({"rollout": {"ahead": 1, "epochs": 2}}, 1),
    "adapters": ({"lora": {"rank": 4}, "rollout": {"ahead": 1}}, 1),
    "bfloat16, few requests": (
        {"model": tiny.model(dtype="bfloat16"), "mesh": SPLIT, "serve": {"max_requests": 3}}, 8,
    ),
    "latents": ({"model": tiny.one_block(tiny.MLA)}, 1),
    "recurrent": ({"model": tiny.one_block(tiny.DELTA), "serve": {"snapshots": 5}}, 1),
}  # fmt: skip


def here(tree):
    """Bytes of a tree's arrays on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == first
    )


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.slow
def test_cache_and_weights_are_the_bytes_that_a_real_run_takes(name):
    sections, devices = RUNS[name]
    cfg = tiny.with_rollouts(**sections)
    run = tiny.make_run(cfg, devices)
    state, generator = run.init(), Generator(run, cfg.rollout.prompts * cfg.rollout.samples)
    generator.load(state.params)
    programs = generator.engine.programs
    assert capacity.cache_bytes(run) == {"cache": here(programs.cache)}
    counted = fit.state_bytes(run)
    assert counted.get("older weights", 0) == here(state.behind)
    assert counted["parameters"] == here(state.params)
    assert counted["optimizer"] == here(state.opt)
    engine, _, _ = capacity.engine_run(run, cfg.rollout.prompts * cfg.rollout.samples)
    ours = {id(leaf) for leaf in jax.tree.leaves(state.params)}
    own = [leaf for leaf in jax.tree.leaves(programs._params) if id(leaf) not in ours]
    moved = 0
    if "own" in name:
        moved = capacity._count_moved(run.abstract.params, engine.abstract.params)
    made = capacity.copied_bytes(engine)
    assert made <= here(own) <= made + moved


def planned(cfg, roofline=None, where="h100:1x1", prompt=None, run=None):
    """The plan of a run whose step has this bound, and 1000 bytes of activations."""
    run = run or tiny.make_run(cfg)
    memory = fit.state_bytes(run) | {"batch": 10, "activations": 1000}
    step = plan(memory=memory, needed=sum(memory.values()), roofline=roofline)
    lengths = Lengths.of(cfg, None, prompt)
    return run, capacity.with_rollouts(step, run, topology.parse(where), lengths)


def test_what_fits_is_the_larger_of_a_step_and_a_rollout_with_the_engine():
    run, found = planned(tiny.with_rollouts())
    cache, rollout = capacity.cache_bytes(run), found.rollout
    assert rollout.in_update == cache
    assert found.needed == max(
        sum(found.memory.values()) + cache["cache"],
        sum(fit.state_bytes(run).values()) + sum(rollout.in_rollout.values()),
    )


def test_an_engine_beside_training_holds_its_weights_and_copies_while_a_step_runs():
    run, found = planned(tiny.with_rollouts(rollout={"ahead": 2}))
    whole, rollout = fit.shard_bytes(run.abstract.params), found.rollout
    assert rollout.in_update["copies for it"] == 2 * whole
    assert rollout.in_rollout["copies for it"] == 3 * whole
    assert rollout.in_update["engine's weights"] == rollout.in_rollout["engine's weights"] > 0


def test_parts_of_the_state_have_names():
    value = {"advantage": {"baseline": "value"}, "kl": {"weight": 0.1}}
    run = tiny.make_run(tiny.with_rollouts(objective=value))
    parts = fit.state_bytes(run)
    assert parts["value head"] == run.cfg.model.embed * 4
    assert parts["reference"] == parts["parameters"] + parts["value head"]


def test_answers_take_a_step_a_token_of_as_many_as_run_at_a_time():
    """32 answers, 12 at a time: two waves of 12 and one of 8."""
    cfg = tiny.with_rollouts(serve={"max_requests": 12}, rollout={"minibatches": 2})
    bound = Roofline(compute=0.25, memory=0.0, attention=0.0, network={})
    run, found = planned(cfg, bound, prompt=20)
    engine, where = engine_config(cfg, 32), topology.parse("h100:1x1")
    sizes = dict(run.mesh.shape)
    device, layout = Device.of(engine, where, sizes), Layout.of(cfg.model, cfg.serve, "cuda")
    read = read_bytes(layout, layout.on(cfg.mesh, sizes), 20, 36)
    flops = forward_flops(engine, 20, 36)
    each = [device.speed(rows, flops, rows * read).seconds for rows in (12, 12, 8)]
    rollout = found.rollout
    assert (rollout.prompt, rollout.answer, rollout.requests) == (20, 16, 12)
    assert rollout.sampling["answers"].seconds == pytest.approx(15 * sum(each))
    assert rollout.learning["update"].seconds == 0.5
    assert rollout.learning["log-probabilities before"].seconds > 0
    parts = [*rollout.sampling.values(), *rollout.learning.values()]
    assert rollout.seconds == pytest.approx(sum(part.seconds for part in parts))
    assert rollout.samples_per_second == pytest.approx(32 / rollout.seconds)


@pytest.mark.compiler("h100:2x8")
def test_each_host_has_an_engine_and_all_weights_on_the_way_to_it():
    cfg, where = tiny.with_rollouts(mesh={"data": 1, "fsdp": 8, "tensor": 2}), "h100:2x8"
    hosts = topology.parse(where)
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, hosts.devices()))
    _, found = planned(cfg, where=where, run=run)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract.params))
    assert found.rollout.replicas == 16 and found.rollout.requests == 2
    assert found.rollout.in_rollout["weights moved to it"] == 2 * whole
    assert found.rollout.sampling["weights to the engine"].limit == "network"


def test_samples_are_counted_with_the_lengths_that_are_asked_for():
    cfg = tiny.with_rollouts()
    room = cfg.rollout.room(cfg.train.batch_size, cfg.data.seq_len)
    assert Lengths.of(cfg, None, None) == Lengths(room - 16, 16)
    assert Lengths.of(cfg, None, 10) == Lengths(10, 16)
    assert Lengths.of(cfg, 20, 12) == Lengths(12, 8)
    with pytest.raises(ConfigError, match=rf"--length {room + 1}: .* has {room} tokens at most"):
        Lengths.of(cfg, room + 1, None)
    with pytest.raises(ConfigError, match="leave 17 tokens for the answer, and .* allows 1 to 16"):
        Lengths.of(cfg, 27, 10)


def test_a_cache_beyond_the_memory_is_refused_before_anything_is_compiled():
    run = tiny.make_run(tiny.with_rollouts())
    with pytest.raises(ConfigError, match=r"cache 9\d+\.\d+\).*`maxstack plan` shows"):
        fit.check_memory(run, {"cache": 10**12})


@pytest.fixture
def file(tmp_path):
    return tiny.write(tmp_path, tiny.with_rollouts(rollout={"epochs": 2}))


@pytest.mark.slow
def test_the_screen_has_a_column_for_each_time(file, tmp_path, maxstack):
    out = tmp_path / "plan.json"
    printed, made = maxstack(f"plan {file} --json {out} --prompt 9"), json.loads(out.read_text())
    assert "update" in printed and "older weights" in printed and "engine's weights" in printed
    assert "8 prompts x 4 samples of 9 + 16 tokens; engine replicas: " in printed
    assert made["rollout"]["in_update"]["cache"] > 0 and made["rollout"]["seconds"] is None


@pytest.mark.parametrize(
    "options, message",
    [
        ("--search", "--search: ranks training steps only"),
        ("--batch max", "--batch: train.batch_size limits the length"),
        ("--tokens 1B", "--tokens: does not apply to a run with rollouts"),
    ],
)
def test_options_that_say_nothing_of_rollouts_are_refused(options, message, file, maxstack):
    assert message in maxstack(f"plan {file} --topology v5e:1x1 {options}", code=1)
