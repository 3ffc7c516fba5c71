"""`maxstack kernels`, and kernels for hardware that is not here inside a sharded step: they
compile, and plan counts their FLOPs."""

import json

import pytest
import tiny
from topologies import needs

from maxstack import cli
from maxstack.config import dump
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
    mixer = {
        "kind": "attention",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "backend": backends["attention"],
    }
    mlp = {"kind": "moe", "experts": 4, "top_k": 2, "hidden": 128, "backend": backends["experts"]}
    model = {
        "vocab": 512,
        "embed": 128,
        "layers": 2,
        "pattern": [],
        "dtype": "bfloat16",
        "blocks": {"only": {"mixer": mixer, "mlp": mlp}},
        "head": {"backend": backends["head"]},
    }
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
        if "only.mlp" in one.op_name and "BTD,DE->BTE" not in one.op_name  # the router's
    )
    rows = 8 // (where.size // 2)
    matmul = (
        2 * (rows * 256 * 2) * 128 * 64 * 2
    )  # of each token's two experts, over half of their hidden units, in both layers
    # a block may have twice the rows of a group
    assert 9 * matmul <= flops <= 2 * 9 * matmul and not program.uncounted


@pytest.mark.slow
def test_the_command_names_what_serves_and_why_each_other_does_not(tmp_path, capsys):
    (tmp_path / "run.yml").write_text(dump(tiny.config()))
    assert (
        cli.main(f"kernels {tmp_path / 'run.yml'} --json {tmp_path / 'kernels.json'}".split()) == 0
    )
    told, found = capsys.readouterr().out, json.loads((tmp_path / "kernels.json").read_text())
    assert {(one["op"], one["backend"]) for one in found} == {
        ("attention", "blockwise"),
        ("linear_cross_entropy", "blockwise"),
    }
    assert "splash     no: runs on tpu, and this is a cpu" in told
    assert "window=12, causal" in told and "  for model.blocks.local.mixer\n" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["model.head.backend=pallas_tpu"],
            "model.head.backend: backend pallas_tpu cannot serve: runs on tpu, and this "
            "is a cpu; blockwise or",
        ),
        (
            ["model.blocks.local.mixer.backend=cudnn"],
            "model.blocks.local.mixer.backend: backend cudnn cannot serve",
        ),
        (
            ["xla.flags={xla_gpu_nonsense: 1}"],
            "xla.flags.xla_gpu_nonsense: is a flag for gpu, and xla.platform is null",
        ),
        (
            ["xla.flags={xla_nonsense: 1}"],
            "xla.flags.xla_nonsense: there is no such flag, says the compiler of jaxlib",
        ),
        (
            ["--json", "nowhere/kernels.json"],
            "--json nowhere/kernels.json: the folder nowhere does not exist",
        ),
    ],
)
def test_a_pinned_kernel_that_cannot_serve_and_a_flag_that_is_none_are_errors(
    tmp_path, capsys, words, told
):
    (tmp_path / "run.yml").write_text(dump(tiny.config()))
    assert cli.main(["kernels", str(tmp_path / "run.yml"), *words]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_step_that_generates_names_its_kernels(tmp_path, capsys):
    (tmp_path / "run.yml").write_text(dump(tiny.config()))
    assert cli.main(f"kernels {tmp_path / 'run.yml'} --serve serve.rows=16".split()) == 0
    printed = capsys.readouterr().out
    assert "paged_attention on cpu" in printed and "rows=16" in printed
    assert "for model.blocks.local.mixer" in printed and "tiles       chosen" in printed
