"""`maxstack kernels`, and kernels for hardware that is not here inside a sharded step: they
compile, and plan counts their FLOPs."""

import json

import pytest
import tiny
from topologies import needs

from maxstack.plan.program import parse as read
from maxstack.plan.step import compile_step
from maxstack.plan.topology import parse
from maxstack.plan.work import operations

PINNED = {
    "tpu": {"attention": "splash", "experts": "megablox", "head": "pallas_tpu"},
    "gpu": {"attention": "hopper", "experts": "blocks", "head": "blockwise"},
}
OP_OF = {"attention": "attention", "experts": "grouped_matmul", "head": "linear_cross_entropy"}


def mixture(backends, mesh):
    """Two layers with experts, in bfloat16, whose ops are pinned."""
    mixer = tiny.ATTENTION | {"head_dim": 64, "backend": backends["attention"]}
    mlp = tiny.MOE | {"hidden": 128, "backend": backends["experts"]}
    sizes = {"vocab": 512, "embed": 128, "layers": 2, "dtype": "bfloat16"}
    model = tiny.one_block(mixer, mlp, head={"backend": backends["head"]}, **sizes)
    sources = [{"kind": "synthetic", "documents": 64, "length": 50, "vocab": 512}]
    return tiny.config(model=model, mesh=mesh, data={"sources": sources, "seq_len": 256})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("v5e:2x2", marks=needs("v5e:2x2")),
        pytest.param("h100:1x4", marks=[needs("h100:1x4"), pytest.mark.release]),
    ],
)
def test_pinned_kernels_serve_a_step_split_over_fsdp_and_tensor_and_experts_count(name):
    where = parse(name)
    backends = PINNED["gpu" if where.chip.platform == "cuda" else "tpu"]
    step = compile_step(mixture(backends, {"fsdp": -1, "tensor": 2, "data": 1}), where)
    served = {choice.op: choice.backend for choice in step.run.kernels}
    assert served == {OP_OF[part]: backend for part, backend in backends.items()}
    program = read(step.compiled.as_text())
    flops = sum(
        one.flops
        for one in operations(program)
        if "block.mlp" in one.op_name and "BTD,DE->BTE" not in one.op_name  # the router's
    )
    rows = 8 // (where.size // 2)
    # of each token's two experts, over half of their hidden units, in both layers
    matmul = 2 * (rows * 256 * 2) * 128 * 64 * 2
    # a block may have twice the rows of a group
    assert 9 * matmul <= flops <= 2 * 9 * matmul and not program.uncounted


@pytest.mark.slow
def test_the_command_names_what_serves_and_why_each_other_does_not(tmp_path, maxstack):
    path, out = tiny.write(tmp_path, tiny.config()), tmp_path / "kernels.json"
    told, found = maxstack(f"kernels {path} --json {out}"), json.loads(out.read_text())
    served = {(one["op"], one["backend"]) for one in found}
    assert served == {(op, "blockwise") for op in ("attention", "linear_cross_entropy")}
    assert "splash     no: runs on tpu, and this is a cpu" in told
    assert "window=12, causal" in told and "  for model.blocks.local.mixer\n" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "model.head.backend=pallas_tpu",
            "model.head.backend: backend pallas_tpu cannot serve: runs on tpu, and this "
            "is a cpu; blockwise or",
        ),
        (
            "model.blocks.local.mixer.backend=cudnn",
            "model.blocks.local.mixer.backend: backend cudnn cannot serve",
        ),
        (
            "xla.flags.xla_gpu_nonsense=1",
            "xla.flags.xla_gpu_nonsense: is a flag for gpu, and xla.platform is null",
        ),
        (
            "xla.flags.xla_nonsense=1",
            "xla.flags.xla_nonsense: there is no such flag, says the compiler of jaxlib",
        ),
        (
            "--json nowhere/kernels.json",
            "--json nowhere/kernels.json: the folder nowhere does not exist",
        ),
    ],
)
def test_a_pinned_kernel_that_cannot_serve_and_a_flag_that_is_none_are_errors(
    tmp_path, maxstack, words, told
):
    path = tiny.write(tmp_path, tiny.config())
    assert told in maxstack(f"kernels {path} {words}", code=1)


@pytest.mark.slow
def test_the_step_that_generates_names_its_kernels(tmp_path, maxstack):
    path = tiny.write(tmp_path, tiny.config())
    printed = maxstack(f"kernels {path} --serve serve.rows=16")
    assert "paged_attention on cpu" in printed and "rows=16" in printed
    assert "for model.blocks.local.mixer" in printed and "tiles       chosen" in printed
