"""The bound on a step's time: seconds by hand, for a v5e of 197 TFLOP/s and 819 GB/s and an H100 of
450 GB/s NVLink."""

import pytest
import tiny

from maxstack.hardware.chips import chip
from maxstack.plan.roofline import Flow, attention_flops, flows, roofline
from maxstack.plan.topology import Link, groups, parse
from maxstack.plan.traffic import Collective, sent
from maxstack.plan.work import Operation
from maxstack.schema.mesh import AXES

ROWS, SEQ, WINDOW, HEADS, HEAD = 8, 48, 12, 4, 8


def operation(flops, bytes_, dtype="bf16"):
    return Operation("", "dot", "", 1.0, flops, bytes_, dtype)


def flow(link, seconds):
    return Flow("all-gather", ("fsdp",), link, 1.0, 0.0, seconds)


def bound(operations=(), over=(), name="v5e"):
    return roofline(tiny.config(), chip(name), 8, operations, over)


def over(name, *found, **sizes):
    return list(flows(found, groups(parse(name), tuple(sizes.get(axis, 1) for axis in AXES))))


def collective(kind, payload, size, *axes):
    return Collective(kind, axes, size, 1.0, payload, sent(kind, payload, size), "", "")


def test_each_operation_takes_its_products_or_its_bytes():
    found = bound([operation(3 * 197e12, 819e9), operation(197e12, 2 * 819e9), operation(0, 819e8)])
    assert (found.compute, found.memory) == pytest.approx((3, 2.1))
    assert found.device == found.seconds == pytest.approx(5.1 + found.attention)
    assert found.limit == "compute"
    assert bound([operation(197e12, 2 * 819e9)]).limit == "memory"


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("h100", "bf16", 989.4e12),
        ("h100", "f32", 494.7e12),
        ("h100", "s8", 1978.9e12),
        ("h100", "f8e4m3fn", 1978.9e12),
        ("v5p", "f8e5m2", 459e12),
    ],
)
def test_products_run_at_the_peak_of_their_format(name, dtype, peak):
    assert bound([operation(1e15, 0.0, dtype)], name=name).compute == pytest.approx(1e15 / peak)


def test_the_slowest_network_limits_and_those_of_one_kind_follow_each_other():
    work = [operation(4 * 197e12, 0.0)]
    slow = [flow("DCN", 2.0), flow("ICI", 4.5), flow("DCN", 3.0), flow("memory", None)]
    found = bound(work, slow)
    assert found.network == {"DCN": 5.0, "ICI": 4.5, "memory": 0.0}
    assert (found.seconds, found.limit) == (5.0, "DCN")
    assert bound(2 * work, slow).limit == "compute"


@pytest.mark.parametrize(
    ("remat", "forwards"),
    [
        ({"policy": "none"}, 1),
        ({"policy": "full"}, 2),
        ({"policy": "save", "names": ["query"]}, 2),
        ({"policy": "save", "names": ["context"]}, 1),
    ],
    ids=str,
)
def test_attention_is_a_triangle_of_scores_made_again_under_remat(remat, forwards):
    local, whole = (
        sum(0 <= t - s < window for t in range(SEQ) for s in range(SEQ)) for window in (WINDOW, SEQ)
    )
    scores = 2 * local + whole  # two layers with a window and one without
    flops = (2 * forwards + 5) * 2 * HEADS * HEAD * ROWS * scores / 4
    cfg = tiny.config(model=tiny.model(remat=remat))
    assert attention_flops(cfg, 4) == pytest.approx(flops)
    assert roofline(cfg, chip("h100"), 4, (), ()).attention == pytest.approx(flops / 494.7e12)


def test_attention_without_a_causal_mask_is_a_square_of_scores():
    model = tiny.model(pattern=["global"], layers=1)
    model["blocks"]["global"]["mixer"]["causal"] = False
    assert attention_flops(tiny.config(model=model), 1) == pytest.approx(
        7 * 2 * HEADS * HEAD * ROWS * SEQ * SEQ
    )


def test_a_switch_that_adds_halves_an_all_reduce_alone():
    reduce, gather = (collective(kind, 450e9, 8, "fsdp") for kind in ("all-reduce", "all-gather"))
    halved = [one.seconds for one in over("h100:1x8", reduce, gather, fsdp=8)]
    assert halved == pytest.approx([7 / 8, 7 / 8])
    assert over("a100-80:1x8", reduce, fsdp=8)[0].seconds == pytest.approx(2 * 7 / 8 * 450 / 300)


@pytest.mark.parametrize(
    "name, sizes, bandwidth",
    [
        ("v5e:16x16", {"fsdp": 64, "tensor": 4}, 200e9),
        ("h100:1x8", {"fsdp": 4, "tensor": 2}, 450e9),
    ],
)
def test_axes_of_a_torus_add_and_those_of_a_switch_share_its_port(name, sizes, bandwidth):
    n = sizes["fsdp"] * sizes["tensor"]
    (found,) = over(name, collective("all-gather", 1e9, n, "fsdp", "tensor"), **sizes)
    assert found.seconds == pytest.approx(1e9 * (n - 1) / n / bandwidth)


def test_a_group_over_hosts_and_within_them_sends_each_byte_over_the_network_once():
    both, one = (
        over("h100:4x8", collective("all-gather", 1e9, 32, *sizes), **sizes)[0]
        for sizes in ({"data": 4, "fsdp": 8}, {"fsdp": 32})
    )
    assert (both.link, both.seconds) == ("network", pytest.approx(one.seconds))
    # what the other hosts hold, through a host's eight ports
    assert both.seconds >= 1e9 * 24 / 32 / (8 * chip("h100").network)


def test_collectives_of_one_kind_and_axes_are_one_flow():
    gather = collective("all-gather", 1e9, 8, "fsdp")
    found = over("h100:1x8", gather, collective("all-reduce", 1e9, 8, "fsdp"), gather, fsdp=8)
    assert [(one.kind, one.times, one.bytes) for one in found] == [
        ("all-gather", 2.0, 2 * 7 / 8 * 1e9),
        ("all-reduce", 1.0, 2 * 7 / 8 * 1e9),
    ]


def test_a_link_of_unknown_speed_has_no_time():
    (found,) = flows([collective("all-gather", 1e9, 8, "fsdp")], lambda axes: Link("memory", None))
    assert (found.link, found.seconds) == ("memory", None)
