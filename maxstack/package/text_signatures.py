"""Signatures of decoders: functions of whole texts (`score`, `embed`, `reward`), and the engine's
steps over a paged cache (`prefill`, `logits`, `decode`).
Shapes: B batch  T time  R rows, each a token of a request  O outputs  S requests  W pages of a
request at most  D embed  V vocab."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxstack.inference import sampling
from maxstack.inference.layout import Layout
from maxstack.inference.programs import Programs
from maxstack.inference.runner import Batch, flatten_cache, unflatten_cache
from maxstack.inference.sampler import GROUP, logprobs
from maxstack.inference.score import make_scorer, text_batch
from maxstack.layers.batch_invariance import in_groups
from maxstack.layers.cache import Rows
from maxstack.package.signature import Array, Arrays, Signature
from maxstack.state import flat, tree

if TYPE_CHECKING:
    from maxstack.run import Run

FEWEST = 16
"""Tokens of the shortest length that has programs of its own."""
FILTERS = {"temperature": (0, 1000), "top_p": (1e-30, 1), "min_p": (0, 1), "top_k": (0, 1 << 30)}
"""Sampling parameters of `decode` with their ranges, which include both ends. A new one is required
of all who call packages that are made from then on."""


def lengths_of(longest: int) -> list[int]:
    """Return the lengths that have programs of their own: the longest, and quarters of it."""
    lengths = [longest]
    while len(lengths) < 4 and lengths[-1] // 4 >= FEWEST:
        lengths.append(lengths[-1] // 4)
    return lengths[::-1]


class Weights:
    """Weights as steps of inference read them, by name: those of the pattern's repetitions apart,
    which `score` stacks again."""

    def __init__(self, prepared: Any):
        self.arrays: Arrays = {}
        self._repeated: dict[str, int] = {}
        for path, kept in flat(prepared).items():
            if isinstance(kept, tuple):
                self._repeated[path] = len(kept)
                # One weight for each repetition, since arguments of a program are arrays by name.
                self.arrays |= {f"{path}/{i}": array for i, array in enumerate(kept)}
            else:
                self.arrays[path] = kept

    def apart(self, arrays: Arrays) -> Any:
        """Return them as `Programs` take them."""
        return self._tree(arrays, tuple)

    def stacked(self, arrays: Arrays) -> Any:
        """Return them as the model's own graph takes them."""
        return self._tree(arrays, jnp.stack)

    def _tree(self, arrays: Arrays, joined: Callable[[list[Any]], Any]) -> Any:
        whole = dict(arrays)
        for path, count in self._repeated.items():
            whole[path] = joined([whole.pop(f"{path}/{i}") for i in range(count)])
        return tree(whole)


def rows_of(inputs: Mapping[str, Any]) -> Rows:
    """Return the rows of a step, without adapters."""
    tokens = inputs["tokens"]
    return Rows(tokens, inputs["positions"], inputs["requests"], jnp.zeros_like(tokens))


def _texts(vocab: int) -> dict[str, Array]:
    return {
        "tokens": Array(("batch", "length"), "int32", (0, vocab - 1)),
        "lengths": Array(("batch",), "int32", (1, "length")),
    }


def text_signatures(
    run: "Run", weights: Weights, lengths: Sequence[int], normalize: bool
) -> Iterator[Signature]:
    """Yield the signatures that read whole texts."""
    sizes = [{"batch": None, "length": length} for length in lengths]

    def hidden(arrays: Arrays, inputs: Arrays) -> tuple[Any, jax.Array, jax.Array]:
        lengths_B = inputs["lengths"]
        batch, real_BT = text_batch(inputs["tokens"], lengths_B)
        model: Any = nnx.merge(run.graph, nnx.State(weights.stacked(arrays)))
        with run.weights.rewrite.count_only(real_BT):
            x_BTD = model.hidden(batch)
        # Padding rows have length 0 and no last token.
        return model, x_BTD, jnp.maximum(lengths_B - 1, 0)[:, None]

    def rewarded(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        model, x_BTD, last_B1 = hidden(arrays, inputs)
        return {"rewards": jnp.take_along_axis(model.scores(x_BTD), last_B1, 1)[:, 0]}, {}

    texts = _texts(run.cfg.decoder.vocab)
    if run.cfg.decoder.head.scores:
        about = "The score of the last token of each text."
        yield Signature("reward", about, rewarded, texts, {"rewards": ("batch",)}, sizes)
        return

    def scored(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        # What `maxstack score` computes, so that results agree.
        step = make_scorer(run, True)
        return step(weights.stacked(arrays), inputs["tokens"], inputs["lengths"]), {}

    def embedded(arrays: Arrays, state: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        _, x_BTD, last_B1 = hidden(arrays, inputs)
        x_BD = jnp.take_along_axis(x_BTD, last_B1[..., None], 1)[:, 0].astype(jnp.float32)
        if normalize:
            x_BD = x_BD / jnp.maximum(jnp.linalg.norm(x_BD, axis=-1, keepdims=True), 1e-12)
        return {"embedding": x_BD}, {}

    vocab, embed = run.cfg.decoder.vocab, run.cfg.decoder.embed
    about = "Logits at each token, and the log-probability of each token by those before it."
    outputs = {"logprobs": ("batch", "length"), "logits": ("batch", "length", vocab)}
    yield Signature("score", about, scored, texts, outputs, sizes)
    about = f"The state of the last token{', of length 1' * normalize}."
    yield Signature("embed", about, embedded, texts, {"embedding": ("batch", embed)}, sizes)


def generation_signatures(
    run: "Run",
    programs: Programs,
    weights: Weights,
    layout: Layout,
    pages: Sequence[int],
    length: int,
) -> list[Signature]:
    """Return the signatures that generate, over a paged cache: `prefill` writes rows into it,
    `logits` reads some of its results, `decode` takes the last token of each request and chooses
    the next by temperature, top_k, top_p, min_p and seed, as `maxstack generate` does."""
    slots, width = programs.slots, programs.width
    tables = {
        f"tables.{i}": Array((slots, width), "int32", (0, most)) for i, most in enumerate(pages)
    }
    embed, vocab = run.cfg.decoder.embed, run.cfg.decoder.vocab
    dtype = run.cfg.model.dtype

    def stepped(arrays: Arrays, cache: Arrays, inputs: Arrays) -> tuple[jax.Array, Arrays]:
        batch = Batch(rows_of(inputs), tuple(inputs[name] for name in tables))
        kept = unflatten_cache(cache, len(layout.arrays))
        x_RD, kept = programs.step(weights.apart(arrays), kept, batch)
        return x_RD, flatten_cache(kept)

    def prefill(arrays: Arrays, cache: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        x_RD, cache = stepped(arrays, cache, inputs)
        return {"states": x_RD}, cache

    def logits(arrays: Arrays, cache: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        x_RD = inputs["states"]
        normed_RD, logits_RV = programs.logits_of(weights.apart(arrays), x_RD)
        return {"normed": normed_RD, "logits": logits_RV}, {}

    def decode(arrays: Arrays, cache: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        x_RD, cache = stepped(arrays, cache, inputs)
        logits_RV = programs.logits_of(weights.apart(arrays), x_RD)[1]
        ones_R, zeros_R = jnp.ones_like(inputs["top_p"]), jnp.zeros_like(inputs["top_p"])
        settings = sampling.Settings(
            **{name: inputs[name] for name in FILTERS},
            # No penalties: they need the history of a request, which no program holds.
            repetition_penalty=ones_R,
            presence_penalty=zeros_R,
            frequency_penalty=zeros_R,
            seed=inputs["seeds"],
            choice=inputs["choices"],
            # The position of the token that is chosen decides its random key, as in the engine.
            position=inputs["positions"] + 1,
        )
        # In the engine's groups, so that a seed gives the tokens of `maxstack generate`.
        next_R = in_groups(sampling.choose, GROUP)(logits_RV, settings)
        chosen = {"next": next_R, "logprobs": logprobs(logits_RV, next_R, ones_R, 0)[0]}
        return chosen, cache

    most = {"tokens": vocab - 1, "positions": length - 1, "requests": slots - 1}
    rows = {name: Array(("rows",), "int32", (0, last)) for name, last in most.items()}
    filters = {
        name: Array(("rows",), "int32" if name == "top_k" else "float32", ends)
        for name, ends in FILTERS.items()
    }
    keys = {
        "choices": Array(("rows",), "int32", (0, None)),
        "seeds": Array(("rows", 2), "uint32"),
    }
    # Numbers of rows cannot be a symbol: a norm pads two rows at least, so it must know how many.
    some = [{"rows": size} for size in programs.sizes]
    # Each row has logits [V] in float32, so there are fewer of them at a time.
    few = [{"rows": size} for size in programs.sizes if size <= max(programs.outputs)]
    return [
        Signature(
            "prefill",
            "Tokens of requests into the cache; the state of each, for `logits`.",
            prefill,
            rows | tables,
            {"states": ("rows", embed)},
            some,
            stateful=True,
        ),
        Signature(
            "logits",
            "Normed states and logits of states that `prefill` gave.",
            logits,
            {"states": Array(("rows", embed), dtype)},
            {"normed": ("rows", embed), "logits": ("rows", vocab)},
            few,
        ),
        Signature(
            "decode",
            "The last token of each request into the cache; the next token of each.",
            decode,
            rows | tables | filters | keys,
            {"next": ("rows",), "logprobs": ("rows",)},
            few,
            stateful=True,
        ),
    ]
