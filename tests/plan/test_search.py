"""Candidates and results of a search, and the search for the largest batch, with a compiler
that only says what it is told to say."""

import math

import pytest
import tiny
from plans import plan

from maxstack.errors import ConfigError
from maxstack.plan import search as module
from maxstack.plan import topology
from maxstack.plan.estimate import Shapes, estimate
from maxstack.plan.roofline import Roofline
from maxstack.plan.search import largest_batch, search
from maxstack.plan.topology import links, parse
from maxstack.schema import rules

GIVEN = {"data": 4, "fsdp": 4}
MOE = tiny.one_block(mlp={"kind": "moe", "experts": 8, "top_k": 2, "hidden": 32})
USABLE = 2**34


WHERE = parse("v5e:4x4")


def made(cfg, needed=USABLE, seconds=1.0, usable=USABLE):
    """The plan of a configuration that needs so much and takes so long."""
    sizes = {"batch_size": cfg.train.batch_size, "seq_len": cfg.data.seq_len}
    roofline = Roofline(seconds, 0.0, 0.0, {})
    return plan(**sizes, devices=16, needed=needed, usable=usable, roofline=roofline)


class Compiler:
    """Remembers what it was asked for; `says(cfg)` gives what the plan needs and its seconds."""

    def __init__(self, says):
        self.says, self.asked = says, []

    def __call__(self, cfg):
        self.asked.append(cfg)
        return made(cfg, *self.says(cfg))


def config(mesh=None, rows=16, **sections):
    return tiny.config(mesh={"data": 1} | (mesh or GIVEN), train={"batch_size": rows}, **sections)


def candidates(cfg, name="v5e:4x4"):
    return list(module._candidates(cfg, parse(name)))


def memory(cfg):
    sizes = {axis: getattr(cfg.mesh, axis) for axis in topology.AXES}
    over = links(WHERE, tuple(sizes.values()))
    return estimate(Shapes.of(cfg), cfg, sizes, WHERE.chip, over).memory


@pytest.mark.parametrize(
    "name, model",
    [("v5e:4x4", tiny.model()), ("v5e:2x4*2", MOE), ("h100:2x8", MOE)],
    ids=["dense", "experts, two slices", "gpus"],
)
@pytest.mark.slow
def test_every_candidate_runs_on_all_devices(name, model):
    where = parse(name)
    found = candidates(config({"slices": where.slices, "fsdp": 8, "data": -1}, model=model), name)
    assert len(found) > 20
    for cfg, sizes in found:
        assert rules.faults(cfg) == [] == rules.device_faults(cfg, where.size)
        assert math.prod(sizes.values()) == where.size and sizes["slices"] == where.slices
    assert any(sizes["expert"] > 1 for _, sizes in found) == (model is MOE)


def test_candidates_differ_in_mesh_remat_and_batch():
    found = candidates(config())
    assert {cfg.model.remat.policy for cfg, _ in found} == {"none", "dots", "full"}
    assert {cfg.train.batch_size for cfg, _ in found} == {16, 32, 64}
    powers = {1, 2, 4, 8, 16}
    for axis, sizes in (("data", powers), ("fsdp", powers), ("tensor", {1, 2})):
        assert {each[axis] for _, each in found} == sizes
    assert all(a != b for i, (a, _) in enumerate(found) for b, _ in found[:i])


def test_the_fastest_of_what_was_compiled_comes_first():
    def says(cfg):
        fsdp, policy = cfg.mesh.fsdp, cfg.model.remat.policy
        return 1, 1.0 + (cfg.train.batch_size * fsdp * 37 + len(policy) * 11) % 7

    fake = Compiler(says)
    found = search(config(), WHERE, fake, 6)
    rates = [made.tokens_per_second for _, made in found]
    assert rates == sorted(rates, reverse=True) and len(set(rates)) > 1
    assert len(found) == 7 == len(fake.asked)
    for one, made in found:
        assert one.cfg in fake.asked and made.batch_size == one.cfg.train.batch_size


@pytest.mark.parametrize("mesh", [GIVEN, {"data": -1, "fsdp": 4}], ids=str)
def test_the_given_configuration_is_compiled_first_and_once(mesh, monkeypatch):
    monkeypatch.setattr(module, "MOST_COMPILED", 1000)
    cfg = config(mesh)
    fake = Compiler(lambda _: (1, 1.0))
    search(cfg, WHERE, fake, 1000)
    assert fake.asked[0] == cfg and len(fake.asked) == len(candidates(cfg))
    resolved = [
        {axis: getattr(one.mesh, axis) for axis in topology.AXES if axis != "data"}
        | one.model.remat.model_dump()
        | one.train.model_dump()
        for one in fake.asked
    ]
    assert all(one not in resolved[:i] for i, one in enumerate(resolved))


def test_a_given_configuration_that_does_not_divide_is_left_out():
    cfg = config({"data": -1}, rows=8)
    assert rules.device_faults(cfg, 16) and cfg not in [one for one, _ in candidates(cfg)] != []


def test_a_pipeline_that_is_given_does_not_keep_other_meshes_from_being_tried():
    mesh = {"stage": 2, "fsdp": 8, "microbatches": 4}
    cfg = config(mesh, model=tiny.model(layers=4, pattern=["global"]), rows=32)
    assert any(sizes["stage"] == 1 for _, sizes in candidates(cfg))


@pytest.mark.slow
def test_what_does_not_fit_is_not_returned_and_nothing_larger_is_tried():
    cfg = config()
    fake = Compiler(lambda one: (USABLE + (one.model.remat.policy != "full"), 1.0))
    found = search(cfg, WHERE, fake, 2)
    assert [one.cfg.model.remat.policy for one, _ in found] == ["full"] * 3
    refused: list[float] = []
    for one in fake.asked:
        assert one == cfg or memory(one) < min(refused)
        refused += [memory(one)] if one.model.remat.policy != "full" else []


def test_candidates_that_are_passed_over_do_not_count_as_tried(monkeypatch):
    monkeypatch.setattr(module, "MOST_COMPILED", 2)
    cfg = config(model=tiny.model(remat={"policy": "full"}))
    limit = memory(cfg)
    fake = Compiler(lambda one: (USABLE + (memory(one) >= limit), 1.0))
    found = search(cfg, WHERE, fake, 1)
    assert fake.asked[0] == cfg and len(fake.asked) == 2 and found[0][0].cfg == fake.asked[1]


def test_where_nothing_fits_it_says_so():
    fake = Compiler(lambda _: (USABLE + 1, 1.0))
    said = r"nothing fits: compiled \d+ of \d+ candidates; the smallest needs [\d.]+ of [\d.]+ GiB"
    with pytest.raises(ConfigError, match=said):
        search(config(), WHERE, fake, 3)
    assert 1 < len(fake.asked) <= module.MOST_COMPILED


def test_it_needs_no_compiler_of_its_own(monkeypatch):
    def plugin(*_):
        raise AssertionError

    monkeypatch.setattr(topology, "_ahead_of_time", plugin)
    assert search(config(), WHERE, Compiler(lambda _: (1, 1.0)), 1)


def linear(rows, most):
    """Bytes that grow evenly and reach the limit at `most` rows."""
    return USABLE // 3 + rows * (USABLE * 2 // 3 // most)


def steps(rows, most):
    """In steps of 7 rows."""
    return linear(-(-rows // 7) * 7, -(-most // 7) * 7) + (rows > most) * USABLE


def cliff(rows, most):
    """Hardly any, and all at once far too much."""
    return rows if rows <= most else 1000 * USABLE


def spared(rows, most):
    """A compiler that spares memory near the limit: it stays just below it up to `most` rows, and
    then is what it would have been long before."""
    if rows > most:
        return 2 * USABLE
    return min(linear(rows, max(1, most * 2 // 3)), USABLE - 2 * most + rows)


@pytest.mark.parametrize("most", [1, 2, 3, 20, 1000, 12345])
@pytest.mark.parametrize("needs", [linear, steps, cliff, spared], ids=lambda f: f.__name__)
def test_the_largest_batch_that_fits_is_found_in_few_compilations(needs, most):
    cfg = config({"data": -1, "fsdp": 4})
    fake = Compiler(lambda one: (needs(one.train.batch_size // 16, most), 1.0))
    chosen, made = largest_batch(cfg, WHERE, fake)
    assert chosen.train.batch_size == made.batch_size == 16 * most and chosen.mesh.data == 4
    assert len(fake.asked) == len({one.train.batch_size for one in fake.asked})
    assert len(fake.asked) <= 4 + math.log(most, 8) + (
        0 if needs is linear else 2 * math.log2(most)
    )


def test_where_not_even_one_row_fits_it_says_by_how_much():
    cfg = tiny.config(mesh={"data": 1} | GIVEN, train={"batch_size": 64, "accumulate": 2})
    said = r"not even batch_size=32 fits: it needs 24\.00 of 16\.00 GiB a device"
    with pytest.raises(ConfigError, match=said):
        largest_batch(cfg, WHERE, Compiler(lambda _: (24 * 2**30, 1.0)))


def test_without_a_limit_there_is_no_largest_batch():
    with pytest.raises(ConfigError, match="the device's memory is unknown; give --topology"):
        largest_batch(config(), WHERE, lambda cfg: made(cfg, usable=None))
