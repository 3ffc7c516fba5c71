"""Programs that real compilers made of tiny functions, shortened: layouts, names and sources as
they are, comments of the back end left out.

tpu_loop: v5e:2x2, fsdp=4: five turns of x + tanh(x @ w0) @ w1, w [5, 2, 1024, 1024] sharded over
rows, x [4096, 1024] over rows. tpu_slices: v5e:2x2*2, slices=2 x fsdp=4: gradient of sum((x @ w)^2)
by w [512, 256] over fsdp, x [1024, 512] over both. tpu_sparsecore: tpu7x:2x2x1, fsdp=4 x tensor=2:
tanh(x @ w) @ w.T, w [2048, 4096] over both, x [1024, 2048] over fsdp. cuda: four H100, fsdp=4: as
tpu_slices, within one host.
"""

from pathlib import Path

from maxstack.plan.hlo import Program
from maxstack.plan.program import parse


def captured(name: str) -> Program:
    """One of the programs above."""
    return parse(
        (Path(__file__).parent / "plan" / "hlo" / f"{name}.hlo").read_text(encoding="utf-8")
    )
