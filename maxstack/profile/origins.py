"""Finds where the operations of a compiled step come from: layer, direction and source line.

Layers are `jax.named_scope`s by the keys of the configuration, which jax writes into an
instruction's op_name among its own transformations:
`jit(step)/transpose(jvp(model.blocks.mlp))/dot_general` is a product of the MLP's backward pass.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping

from maxstack.plan import traffic, work
from maxstack.plan.hlo import CALLS, WRAPPERS, Instruction, Program
from maxstack.profile import timeline

DIRECTIONS = ("forward", "backward", "recomputed", "optimizer", "other")
"""The pass of the step that an operation belongs to; `recomputed` is the forward pass that remat
repeats during the backward pass."""
OPTIMIZER = "optimizer"
SEVERAL = "(several layers)"
# Fusions call computations too, but as parts of one operation.
CONTAINERS = {*CALLS} - {*WRAPPERS}
STRUCTURE = re.compile(
    # jax 0.12 writes eval_jaxpr for closed_call.
    r"(jit|pjit)\(.*|closed_call|eval_jaxpr|checkpoint|rematted_computation|remat\d*|while|body|"
    r"cond|scan|branch_\d+_fun|custom_[jv][vj]p_call(_jaxpr)?|shard_map|shmap_body|pallas_call|"
    r".*->.*"
)
"""Parts of an op_name that jax adds by itself and that name no layer."""
# jit( is no transformation: its argument is a function's name, not a scope.
_TRANSFORM = re.compile(r"(?!p?jit\()\w+\((.*)\)")


@dataclasses.dataclass(frozen=True)
class Origin:
    """An instruction of the program. `layer`: the scopes that it was traced in, such as
    model.blocks.block.mixer/attention, or empty. `sources`: its source line, then the line in
    another file that called it; empty if XLA kept none."""

    name: str
    opcode: str
    layer: str
    direction: str
    sources: tuple[str, ...]
    level: int
    op_name: str
    collective: traffic.Collective | None = None
    """None if it sends nothing."""
    cost: work.Operation | None = None
    """FLOPs and bytes; None if it computes nothing."""

    @property
    def known(self) -> bool:
        """True if the text tells its origin."""
        return bool(self.op_name or self.sources)


class Origins:
    """Origins by the names of instructions. `mesh`: axis -> size."""

    def __init__(self, program: Program, mesh: Mapping[str, int]):
        self._program = program
        self._made = {instruction.name: instruction for instruction in program.instructions()}
        self._work = {row.name: row for row in work.operations(program)}
        self._sent = {row.instruction: row for row in traffic.collectives(program, mesh)}
        # A trace may hold thousands of events of one instruction.
        self._of = functools.cache(self._origin)

    def __contains__(self, name: str) -> bool:
        return name in self._made

    @property
    def names(self) -> set[str]:
        """Names of all instructions."""
        return {*self._made}

    def of(self, name: str) -> Origin:
        """Return the origin of an instruction; one that the text does not hold has no layer."""
        return self._of(name)

    def _origin(self, name: str) -> Origin:
        made = self._made.get(name)
        if made is None:
            return Origin(name, "", "", "other", (), timeline.OWN, "")
        maker = work.origin(made)
        collective = self._collective(made)
        # A loop's event lasts as long as everything inside, which is counted by itself.
        level = timeline.OUTER if made.opcode in CONTAINERS else timeline.OWN
        return Origin(
            name=name,
            opcode=made.opcode,
            layer=layer_of(maker.op_name),
            direction=direction_of(maker.op_name),
            sources=tuple(_two(self._program.sources(maker))),
            level=timeline.BESIDE if collective else level,
            op_name=maker.op_name,
            collective=collective,
            cost=self._work.get(name),
        )

    def _collective(self, made: Instruction) -> traffic.Collective | None:
        """Return the collective that an instruction is, starts, or waits for."""
        # A -done and -update lead back to the -start, which names the groups.
        while made.opcode.endswith(("-done", "-update")) and made.operands:
            made = made.inputs[0]
        within = made.inside
        names = [made.name, *(within.instructions if within else ())]
        return next((self._sent[name] for name in names if name in self._sent), None)


def _two(sources: Iterable[str]) -> Iterator[str]:
    """Yield the innermost line, and the innermost one in another file."""
    innermost = ""
    for source in sources:
        if not innermost:
            innermost = source
            yield source
        elif source.rpartition(":")[0] != innermost.rpartition(":")[0]:
            yield source
            return


def layer_of(op_name: str) -> str:
    """Return the named scopes in an op_name, outermost first and each once, without those that jax
    adds; for operations that XLA merged, the scopes that all share, or SEVERAL."""
    all_scopes = [_scopes(name) for name in split_merged(op_name)]
    first, *others = [scopes for scopes in all_scopes if scopes] or [[]]
    # XLA merges sums over devices of several layers into one operation, with a name of up to 4,000
    # characters.
    if not all(scopes[:1] == first[:1] for scopes in others):
        return SEVERAL
    # Lists of scopes, not texts: commonprefix compares whole scopes.
    return "/".join(os.path.commonprefix([first, *others]))


def direction_of(op_name: str) -> str:
    """Return one of DIRECTIONS; for operations that XLA merged, that of the first."""
    layer = layer_of(op_name)
    first = split_merged(op_name)[0]
    if layer.partition("/")[0] == OPTIMIZER:
        return "optimizer"
    # Before `transpose(`: the recomputed forward pass runs inside the backward pass and bears both
    # names.
    if "rematted_computation" in first:
        return "recomputed"
    if "transpose(" in first:
        return "backward"
    # Operations without a layer are forward only where jax differentiated them; others are the
    # step's own bookkeeping.
    return "forward" if "/" in first and (layer or "jvp(" in first) else "other"


def split_merged(op_name: str) -> list[str]:
    """Split the op_name of an operation that XLA merged from several, which it writes as
    a/(b/c:d), or in jaxlib 0.12 also as a/b;a/c."""
    # A leading slash, so that a name that begins with the bracket splits too.
    shared, bracket, rest = f"/{op_name}".partition("/(")
    if not bracket or not rest.endswith(")"):
        return op_name.split(";")
    return [f"{shared}/{each}"[1:] for each in rest[:-1].split(":")]


def _scopes(op_name: str) -> list[str]:
    """Return the scopes of one operation; for a copy of an argument, the tree that it is in."""
    if "/" not in op_name:
        return [op_name.partition("[")[0]] if "[" in op_name else []
    scopes: list[str] = []
    # The last part is the primitive.
    for part in op_name.split("/")[:-1]:
        # Transformations nest: transpose(jvp(scope)).
        while wrapped := _TRANSFORM.fullmatch(part):
            part = wrapped[1]
        if part and not STRUCTURE.fullmatch(part):
            # model.blocks says nothing around model.blocks.block.mlp
            scopes = [scope for scope in scopes if not part.startswith(f"{scope}.")]
            scopes.append(part)
    return [*dict.fromkeys(scopes)]
