"""Refusals of a step before it compiles, and by a TPU's compiler where it does not fit."""

import jax
import pytest
import tiny

from maxstack import sharding
from maxstack.errors import ConfigError
from maxstack.hardware import compiling
from maxstack.plan.step import TooLarge, check_mesh, compile_step, too_large
from maxstack.plan.topology import parse

HBM = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 17.90G of 15.75G hbm. Exceeded hbm \
capacity by 2.15G.

Total hbm usage >= 18.16G:
    reserved        260.00M
    program          12.25G
    arguments         5.65G

Output size 5.65G; shares 5.65G with arguments.

Program hbm requirement 12.25G:
    HLO temp         12.25G (99.8% utilization: Unpadded (12.02G) Padded (12.04G), 0.2% fragmentation (24.50M))

  Largest program allocations in hbm:

  1. Size: 2.50G
     Operator: op_name="jit(traced)/jvp(block)/bth,hv->btv/dot_general[precision=None]" source_file="head.py" source_line=40
     Shape: f32[8,2048,40960]{2,1,0:T(8,128)}
     Unpadded size: 2.50G
     XLA label: fusion.12 = fusion(copy.3, bitcast.9), kind=kOutput, calls=fused_computation.12
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[32,8,2048,512]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 512.00M
     XLA label: broadcast.7 = broadcast(constant.2)
     Allocation type: HLO temp
     ==========================

  3. Size: 84.5M
     Operator: op_type="add" op_name="jit(traced)/transpose(jvp(block))/add_any"
     Shape: s32[11075584]{0:T(1024)}
     Unpadded size: 42.2M
     Extra memory due to padding: 42.2M (2.0x expansion)
     XLA label: add.5 = add(fusion.1, fusion.2)
     Allocation type: HLO temp
     ==========================
"""  # noqa: E501
TEMPORARIES = """RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (21.67G) exceeds available HBM \
(960.50M)."""  # noqa: E501


def test_a_refusal_says_what_is_needed_and_the_largest_allocations_by_name():
    assert too_large(HBM) == TooLarge(
        round(17.9 * 2**30),
        round(15.75 * 2**30),
        (
            (
                int(2.5 * 2**30),
                "f32[8,2048,40960]{2,1,0:T(8,128)}",
                "jit(traced)/jvp(block)/bth,hv->btv/dot_general[precision=None]",
            ),
            (512 * 2**20, "bf16[32,8,2048,512]{3,2,1,0:T(8,128)(2,1)}", ""),
            (
                int(84.5 * 2**20),
                "s32[11075584]{0:T(1024)}",
                "jit(traced)/transpose(jvp(block))/add_any",
            ),
        ),
    )


def test_a_refusal_for_its_temporaries_alone():
    assert too_large(TEMPORARIES) == TooLarge(round(21.67 * 2**30), round(960.5 * 2**20), ())


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: Mosaic failed to compile TPU kernel: Insufficient scoped vmem: 44.05M > 32M",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in "
        "memory space vmem. Used 16.08M of 16.00M vmem. Exceeded by 80.0K.",
        "INVALID_ARGUMENT: Used 3 of 4 operands",
    ],
)
def test_any_other_fault_is_no_want_of_memory(message):
    assert too_large(message) is None


@pytest.mark.slow
def test_a_compiler_s_refusal_is_a_step_without_a_program_and_its_other_faults_are_raised(
    monkeypatch,
):
    def refuse(message):
        def compile_(*_, **__):
            raise RuntimeError(message)

        monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)

    cfg, here = tiny.config(mesh={"fsdp": 8, "data": 1}), parse("here")
    compiling.in_order(sharding.make_mesh(cfg.mesh, jax.devices()))  # which asks the compiler once
    refuse(HBM)
    found = compile_step(cfg, here)
    assert found.compiled is None and found.too_large == too_large(HBM)
    refuse("INTERNAL: no such thing")
    with pytest.raises(RuntimeError, match="no such thing"):
        compile_step(cfg, here)


@pytest.mark.parametrize(
    "mesh, rows, said",
    [
        (
            {"data": 4, "tensor": 2},
            8,
            r"mesh: data=4 x tensor=2 is 8 devices, but v5e:4x4 has 16; set one axis to -1",
        ),
        ({"fsdp": 32}, 32, r"mesh: fsdp=32 is 0 devices, but v5e:4x4 has 16"),
        ({"data": -1}, 8, r"^train.batch_size: batch_size=8 does not divide over the 16 devices"),
        ({"stage": -1, "data": 1}, 16, r"mesh\.stage: the pattern of blocks repeats 1 times"),
    ],
    ids=str,
)
def test_what_does_not_divide_over_the_topology_is_refused_by_its_key(mesh, rows, said):
    with pytest.raises(ConfigError, match=said):
        check_mesh(tiny.config(mesh=mesh, train={"batch_size": rows}), parse("v5e:4x4"))
