"""Packages of the golden families, as `maxstack package` writes them."""

import shutil

import jax
import numpy as np
import parity

from maxstack import cli, sharding
from maxstack.inference import runner
from maxstack.inference.score import make_scorer
from maxstack.inference.trained_model import config_of, read_weights
from maxstack.package import signature
from maxstack.run import assemble

LENGTH = 32
ALL = ["--signature", "score,prefill,logits,decode"]


def small(monkeypatch):
    """Programs of one size."""
    monkeypatch.setattr(signature, "BATCHES", (4,))
    monkeypatch.setattr(runner, "step_sizes", lambda limits: (limits.rows,))


def write(folder, family, monkeypatch, words=ALL):
    """A package of a family's golden folder, for this platform, beside what its run computes and
    what transformers answers."""
    small(monkeypatch)
    out, golden = folder / family, parity.GOLDENS / family
    words = ["--platforms", "cpu", "--lengths", str(LENGTH), *words]
    sizes = ["serve.max_length=64", "serve.max_requests=4", "serve.rows=32", "serve.page=8"]
    where = ["package", str(golden), "--out", str(out), "model.dtype=float32"]
    assert cli.main([*where, *words, *sizes]) == 0
    cfg, own = config_of(str(golden), ["model.dtype=float32"])
    run = assemble(cfg, sharding.make_mesh(cfg.mesh, jax.devices()[:1]), trains=False)
    params = read_weights(str(golden), run, own)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, run.cfg.decoder.vocab, (4, LENGTH)).astype(np.int32)
    lengths = np.array([LENGTH, 20, 1, 7], np.int32)
    results = jax.device_get(jax.jit(make_scorer(run, True))(params, tokens, lengths))
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{family}.score.npz", tokens=tokens, lengths=lengths, **results)
    shutil.copyfile(golden / "greedy.npz", folder / f"{family}-greedy.npz")
    return out
