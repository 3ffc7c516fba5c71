"""The training step's time by component on this machine's device: each part compiled alone at the
run's shapes, forward and backward, and the whole.

The difference between the step and its parts is shown as the rest: residual additions, gradients
put into their stacks, the gradient's norm and rematerialization, less the savings from fusing parts
with each other. Weights and inputs are random. One device: a mesh is left out.

example: python scripts/profile_step.py bench-reference --rounds 5 --json step.json
         python scripts/profile_step.py configs/quickstart.yml train.batch_size=2
"""

import collections
import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench import arguments

from maxstack.errors import ConfigError
from maxstack.hardware import memory
from maxstack.load import load


@dataclasses.dataclass
class Part:
    """A compiled piece of the step."""

    name: str
    count: int
    """Times that a step runs it."""
    call: Callable[[], Any]
    inner: "list[Part]" = dataclasses.field(default_factory=list)
    """Pieces of it that are measured themselves, and do not count in it."""
    seconds: list[float] = dataclasses.field(default_factory=list)

    def time(self) -> None:
        """Add a measurement."""
        from maxstack.kernels import measure

        taken = measure.time_call(self.call)[0]
        self.seconds.append(taken - sum(part.seconds[-1] for part in self.inner))

    @property
    def figures(self) -> dict[str, Any]:
        """Seconds that a step spends on it."""
        seconds = self.count * statistics.median(self.seconds)
        return {"name": self.name, "count": self.count, "seconds": seconds}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = arguments.parser(__doc__)
    parser.add_argument("config", help="a YAML file, or the name of a preset")
    arguments.takes_overrides(parser, "the file")
    arguments.takes_rounds(parser, 5, "every part runs in turn this often; the median counts")
    arguments.takes_json(parser)
    args = parser.parse_intermixed_args()
    memory.use_huge_pages()  # as `maxstack train` does
    memory.run_in_this_thread()
    import jax

    try:
        cfg = load(args.config, args.overrides)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    compiled = []
    for part in parts(cfg):
        print(f"compiled {part.name}", file=sys.stderr)
        compiled.append(part)
    memory.keep_freed(0)  # of parts of any size
    for _ in range(args.rounds):
        for part in compiled:
            part.time()
    step, *components = [part.figures for part in compiled]
    rest = step["seconds"] - sum(row["seconds"] for row in components)
    result = {
        "step": step,
        "components": components,
        "rest": {"seconds": rest},
        "config": args.config,
        "overrides": args.overrides,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tokens": cfg.train.batch_size * cfg.data.seq_len,
        "rounds": args.rounds,
    }
    print(f"{args.config} on {result['device']}, {result['tokens']:,} tokens a step")
    print(f"{'component':34} {'times':>5} {'ms a step':>10} {'share':>7}")
    for row in (*components, {"name": "the rest", "count": 1, "seconds": rest}, step):
        share = row["seconds"] / step["seconds"]
        print(f"{row['name']:34} {row['count']:5} {1e3 * row['seconds']:10.2f} {share:7.1%}")
    arguments.write_json(args.json, result)


def parts(cfg: Any) -> Iterator[Part]:
    """The whole step, then its components."""
    import jax
    import numpy as np

    from maxstack import sharding
    from maxstack.run import assemble
    from maxstack.schema.mesh import MeshConfig

    alone = MeshConfig(data=1)
    cfg = cfg.model_copy(update={"mesh": alone})
    mesh = sharding.make_mesh(alone, jax.devices()[:1])
    run = assemble(cfg, mesh)
    rng, size = np.random.default_rng(0), (cfg.train.batch_size, cfg.data.seq_len)
    tokens = rng.integers(0, cfg.model.vocab, (size[0], size[1] + 1)).astype(np.int32)
    rows = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": np.ones(size, np.float32),
        "segments": np.ones(size, np.int32),
        "positions": np.broadcast_to(np.arange(size[1], dtype=np.int32), size),
    }
    batch = run.batches.place({name: rows[name] for name in run.objective.fields}, size[0])
    yield whole_step(run, batch)
    params = run.init().params
    with sharding.use(mesh, alone):
        if cfg.train.accumulate > 1:
            batch = {name: x[: size[0] // cfg.train.accumulate] for name, x in batch.items()}
        yield from of_model(run, params, batch)
        yield optimizer(run, params)


def whole_step(run: Any, batch: Any) -> Part:
    """The step, whose state is donated and returned."""
    compiled = run.step.lower(run.abstract, run.batches.abstract()).compile()
    state = run.init()

    def call() -> Any:
        nonlocal state
        state, scalars = compiled(state, batch)
        return state, scalars

    return Part("whole step", 1, call)


def optimizer(run: Any, params: Any) -> Part:
    """The optimizer and the new weights."""
    import jax

    from maxstack import optim
    from maxstack.step import select

    tx = optim.build(run.cfg.optimizer, run.cfg.train.steps, run.info)
    params = select(optim.trained_mask(run.cfg.optimizer, run.info), params)

    def update(params: Any, opt: Any, grads: Any) -> Any:
        updates, opt = tx.update(grads, opt, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), opt

    grads = jax.tree.map(lambda p: p * 1e-3, params)
    state = jax.tree.map(lambda p: p.copy(), params), jax.jit(tx.init)(params)
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*state, grads).compile()

    def call() -> Any:
        nonlocal state
        state = compiled(*state, grads)
        return state

    return Part("optimizer", 1, call)


def both(name: str, count: int, f: Callable[..., Any], *args: Any) -> Part:
    """`f` and its gradient by all arguments, compiled."""
    from maxstack.kernels import measure

    return Part(name, count, functools.partial(measure.with_gradients(f, *args), *args))


def of_model(run: Any, params: Any, batch: Any) -> Iterator[Part]:
    """Embedding, the parts of every kind of block, head with loss."""
    import jax
    import numpy as np
    from flax import nnx

    from maxstack.models.decoder import Decoder, _context
    from maxstack.objectives.objective import Models

    cfg, model, pieces = run.cfg, nnx.merge(run.graph, nnx.State(params)), run.cfg.train.accumulate
    context = _context(cfg.model, batch, cfg.data.seq_len)
    shape = (*batch["tokens"].shape, cfg.model.embed)
    x_BTD = jax.numpy.asarray(np.random.default_rng(1).normal(size=shape), cfg.model.dtype)
    yield both(
        "embedding",
        pieces,
        lambda table: (table.astype(cfg.model.dtype))[batch["tokens"]],
        params["embed"],
    )
    for name, (times, block) in blocks(cfg.model, model, x_BTD, context).items():
        yield from of_block(
            name if len(cfg.model.blocks) > 1 else "", times * pieces, block, x_BTD, context, pieces
        )

    class Headed:
        """The model with the output of its blocks."""

        def __init__(self, model: Decoder, x_BTD: jax.Array):
            self.model, self.x_BTD = model, x_BTD

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def trunk(self, batch: Any) -> Any:
            return self.x_BTD, {}, context

    names = {"embed", "head", "head_bias", "norm", "mtp"} & params.keys()
    of_head = {name: params[name] for name in sorted(names)}

    def loss(weights: Any, x_BTD: jax.Array) -> jax.Array:
        headed = Headed(nnx.merge(run.graph, nnx.State({**params, **weights})), x_BTD)
        return run.objective.loss(Models(headed), batch).total

    yield both("final norm, head, cross-entropy", pieces, loss, of_head, x_BTD)


def blocks(cfg: Any, model: Any, x_BTD: Any, context: Any) -> dict[str, tuple[int, Any]]:
    """Block -> its number of layers, and the first of them."""
    import jax
    from flax import nnx

    first = {}
    for key, name in cfg.stacks.items():
        if key in model.blocks:
            graph, state = nnx.split(model.blocks[key])
            first.setdefault(name, nnx.merge(graph, jax.tree.map(lambda x: x[0], state)))
    for part, names in (
        (model.prefix, cfg.prefix),
        (model.rest, cfg.order[cfg.layers - len(model.rest) :]),
    ):
        for i, name in enumerate(names):
            first.setdefault(name, part[f"{i}"])
    shared = {getattr(block.mixer, "share_kv", None) for block in cfg.blocks.values()}
    for name in cfg.blocks:
        if name in first and name in shared:
            context.kept[name] = first[name].keys_values(x_BTD, context)
    return {name: (times, first[name]) for name, times in collections.Counter(cfg.order).items()}


def of_block(
    name: str, times: int, block: Any, x_BTD: Any, context: Any, pieces: int
) -> Iterator[Part]:
    """Norms, the kernel of the mixer, the rest of the mixer, and the MLP of one kind of block."""
    from flax import nnx

    from maxstack.kernels import backends, examples, measure

    every = block.mixer_norm, block.mlp_norm, block.mixer_out_norm, block.mlp_out_norm
    norms = [norm for norm in every if norm is not None]
    before = f"{name} " if name else ""
    if norms:
        graph, state = nnx.split(norms[0])
        yield both(
            f"{before}norms",
            times * len(norms),
            lambda state, x: nnx.merge(graph, state)(x),
            state,
            x_BTD,
        )
    of_mixer, mixer_state = nnx.split(block.mixer)
    with backends.record_choices() as choices:
        mixer = both(
            f"{before}mixer without its kernel",
            times,
            lambda state, x: nnx.merge(of_mixer, state)(x, context),
            mixer_state,
            x_BTD,
        )
    kernels = []
    for choice in choices:
        if choice.op == "attention":
            op = examples.OPS["attention"][0]
            example = examples.attention_example(choice.case, batch=x_BTD.shape[0])
            run, args = measure.call(op[choice.backend], choice.blocks, example)
            part = f"{before}attention kernel, {choice.backend}"
            kernels.append(Part(part, times, functools.partial(run, *args)))
    yield from kernels
    mixer.inner = kernels
    yield mixer
    of_mlp, mlp_state = nnx.split(block.mlp)
    yield both(
        f"{before}MLP",
        times,
        lambda state, x: nnx.merge(of_mlp, state)(x, x, context)[0],
        mlp_state,
        x_BTD,
    )


if __name__ == "__main__":
    main()
