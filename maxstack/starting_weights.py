"""The weights that a run starts from: those of a Hugging Face folder or of another run.

They are read by path, one at a time and straight into the run's shards; those that the source lacks
(a new head, added rows) are drawn as for a run from nothing. Quantization and adapters of this run
come later, from what is given here; those of the other run are undone first.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from pydantic import TypeAdapter

from maxstack.data.hub import model_folder
from maxstack.data.tokenizers import open_tokenizer
from maxstack.errors import ConfigError, DataError
from maxstack.hf.tensors import with_rows
from maxstack.hf.tokenizer import tokenizer_of
from maxstack.load import load_record, run_folder
from maxstack.models.model import initial, weights_of
from maxstack.schema.data import Tokenizer, holds_text
from maxstack.schema.stack import NewRows, StackConfig
from maxstack.state import flat

if TYPE_CHECKING:
    from maxstack.run import Run
    from maxstack.schema.config import Config


def check(run: "Run") -> None:
    """DataError where model.weights belong to another model."""
    folder = run.cfg.model.weights
    assert folder
    if own := run_folder(folder):
        _check_shapes(run, folder, load_record(own).model)
        return
    from maxstack.hf.contents import open_contents
    from maxstack.hf.reader import pieces_of

    shapes = {path: leaf.shape for path, leaf in run.weights.original.items()}
    pieces_of(open_contents(folder), shapes, run.cfg.model)


def check_teacher(run: "Run", teacher: "Run") -> None:
    """DataError as in `check`; ConfigError where the teacher is known to have another tokenizer."""
    folder = teacher.cfg.model.weights
    if not folder:
        return
    check(teacher)
    check_tokens(run, "teacher.from", folder)


def check_tokens(run: "Run", key: str, folder: str) -> None:
    """ConfigError about a key where the model that it names is known to have another tokenizer than
    the run."""
    if not any(holds_text(vars(source)) for source in run.cfg.data.sources):
        return
    if own := run_folder(folder):
        section = load_record(own).data.tokenizer
    elif settings := tokenizer_of(model_folder(folder, weights=False)):
        section = TypeAdapter(Tokenizer).validate_python(settings)
    else:
        return
    # Token by token, not by file: two files may hold one vocabulary, and a teacher's may be longer.
    ours, theirs = open_tokenizer(run.cfg.data.tokenizer), open_tokenizer(section)
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        one, other = (x.special.get(token) or x.pieces[token] for x in (ours, theirs))
        if one != other:
            raise ConfigError(
                f"{key}={folder}: its tokenizer is not that of the run, {ours.name}: token "
                f"{token} is {other!r}, and {one!r} in the run, so what they say cannot be "
                "compared; give a model with the same tokenizer"
            )


def original(run: "Run", finite: bool = True) -> Iterator[tuple[str, jax.Array]]:
    """The weights that model.weights names, before quantization and adapters, by path, one at a
    time, sharded like the run's. DataError as in `check`, and with `finite` for non-finite numbers
    in a Hugging Face folder."""
    folder, wanted = run.cfg.model.weights, run.weights.original
    assert folder
    held = set()
    for path, array in _of_run(run, folder) if run_folder(folder) else _of_folder(run, finite):
        held.add(path)
        yield path, array
    for path in wanted.keys() - held:
        # Drawn from a hash of (seed, path), so a missing weight gets the value that it would have
        # in a run from nothing; jit drops the draws of all others.
        draw = functools.partial(_draw, run.cfg.model, run.cfg.train.seed, path)
        yield path, jax.jit(draw, out_shardings=wanted[path].sharding)()


def _draw(model: StackConfig, seed: int, path: str) -> jax.Array:
    return flat(initial(model, seed))[path]


def _of_folder(run: "Run", finite: bool) -> Iterator[tuple[str, jax.Array]]:
    from maxstack.hf.contents import open_contents
    from maxstack.hf.reader import load_params

    assert run.cfg.model.weights
    contents, wanted = open_contents(run.cfg.model.weights), run.weights.original
    yield from load_params(contents, wanted, model=run.cfg.model, finite=finite)


def _of_run(run: "Run", folder: str) -> Iterator[tuple[str, jax.Array]]:
    """Weights of a run, with its adapters merged and without its quantization."""
    from maxstack.checkpoint.weights import load_newest

    own = run_folder(folder)
    assert own
    # The record's mesh is replaced below, and its number of devices is not that of this process.
    cfg = load_record(own, ["run.virtual_devices=null"])
    _check_shapes(run, folder, cfg.model)
    source, wanted = _source(run, cfg), run.weights.original
    leaves = load_newest(folder, source, run.cfg.checkpoint.weights)
    fresh, _ = run.cfg.model.head_changes(cfg.model)
    longer = run.cfg.model.extended_tables(cfg.model)
    # A head that is new here is drawn, whatever the source has in its place.
    for path in (wanted.keys() & source.weights.original.keys()) - fresh:
        # A weight of a run with adapters or quantization is several arrays below its path.
        of_path = {name: leaf for name, leaf in leaves.items() if f"{name}/".startswith(f"{path}/")}
        make = functools.partial(_merged, source, path, wanted[path], longer.get(path))
        yield path, jax.jit(make, out_shardings=wanted[path].sharding)(of_path)


def _merged(
    source: "Run", path: str, wanted: Any, new: NewRows | None, leaves: Mapping[str, Any]
) -> jax.Array:
    weight = jax.numpy.asarray(source.weights.rewrite.original(path, leaves)).astype(wanted.dtype)
    return with_rows(weight, new, wanted.shape[new.dim]) if new else weight


def _source(run: "Run", cfg: "Config") -> "Run":
    """The run to read weights from, on the mesh of the run that starts."""
    from maxstack.run import assemble

    # Without an optimizer: only weights are read, and its state need not fit.
    return assemble(cfg.model_copy(update={"mesh": run.cfg.mesh}), run.mesh, trains=False)


def _check_shapes(run: "Run", folder: str, source: StackConfig) -> None:
    wanted = {path: tuple(leaf.shape) for path, leaf in run.weights.original.items()}
    shapes = {path: tuple(leaf.shape) for path, leaf in weights_of(source).items()}
    fresh, left = run.cfg.model.head_changes(source)
    longer = run.cfg.model.extended_tables(source)
    # A table that gets rows for new tokens is compared by the rows that the source has.
    wanted |= {path: longer[path].shape_before(wanted[path]) for path in longer.keys() & wanted}
    wanted = {path: shape for path, shape in wanted.items() if path not in fresh}
    shapes = {path: shape for path, shape in shapes.items() if path not in left}
    odd = sorted(path for path in {*wanted, *shapes} if wanted.get(path) != shapes.get(path))
    if odd:
        raise DataError(
            f"{folder}: holds the weights of another model than the configured one: "
            f"{', '.join(odd[:5])} differ; with `model: {{from: {folder}}}` alone the architecture "
            "is that of the run"
        )
