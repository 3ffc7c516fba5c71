"""The programs of TPUs and GPUs multiply in the types of a recipe, forward and backward, and a plan
counts them so."""

import collections

import pytest
import tiny
from topologies import needs

from maxstack.plan.program import parse as program
from maxstack.plan.step import compile_step
from maxstack.plan.topology import parse
from maxstack.plan.work import operations

EMBED, HIDDEN, TOKENS = 256, 512, 16 * 256
MODEL = tiny.one_block(
    {"kind": "attention", "heads": 4, "kv_heads": 4, "head_dim": EMBED // 4},
    {"kind": "gated", "hidden": HIDDEN},
    vocab=512, embed=EMBED, layers=2, dtype="bfloat16",
)  # fmt: skip
WEIGHTS = 2 * (4 * EMBED**2 + 3 * EMBED * HIDDEN)
INT8 = {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"}
FP8 = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn", "bwd_qtype": "float8_e5m2"}


@pytest.mark.parametrize(
    ("name", "rule", "types"),
    [
        pytest.param(name, rule, types, marks=[needs(name), *marks], id=f"{name} {types}")
        for name, rule, types, marks in (
            ("v5e:2x4", INT8, {"s8": 6}, []),
            ("tpu7x:2x2x1", FP8, {"f8e4m3fn": 2, "f8e5m2": 4}, [pytest.mark.release]),
            ("h100:1x8", INT8, {"s8": 6}, [pytest.mark.release]),
            ("h100:1x8", FP8, {"f8e4m3fn": 2, "f8e5m2": 4}, []),
        )
    ],
)
def test_every_product_by_a_quantized_weight_is_of_the_types_of_the_recipe(name, rule, types):
    topology = parse(name)
    cfg = tiny.config(
        model=MODEL,
        quantization={"rules": [{"module_path": ".*/(mixer|mlp)/.*"} | rule]},
        mesh={"fsdp": -1, "data": 1},
        train={"batch_size": 16},
        data={"seq_len": 256},
    )
    found: collections.Counter[str] = collections.Counter()
    for operation in operations(program(compile_step(cfg, topology).compiled.as_text())):
        found[operation.dtype] += operation.flops
    of_a_device = WEIGHTS * TOKENS / topology.size
    low = {dtype: found[dtype] for dtype in found if dtype.startswith(("s8", "f8"))}
    assert sum(low.values()) == pytest.approx(6 * of_a_device, rel=1e-6)
    assert low.keys() == types.keys()
