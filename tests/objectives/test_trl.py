"""Losses of post-training on fixed arrays, against the numbers that TRL 1.16's own code gave, in
tests/goldens/trl."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from maxstack.objectives.distill import divergence
from maxstack.objectives.objective import objective_of
from maxstack.schema.objective import PREFERENCES

FOLDER = Path(__file__).parent.parent / "goldens/trl"
GOLDEN_LOSSES = json.loads((FOLDER / "losses.json").read_text())["losses"]
ARRAYS = np.load(FOLDER / "arrays.npz")
CLOSE = 1e-5
SETTINGS = {
    "robust@0.1": {"loss": "robust", "smoothing": 0.1},
    "exo_pair@0.001": {"loss": "exo_pair", "smoothing": 0.001},
    "aot@0.1": {"loss": "aot", "smoothing": 0.1},
    "aot_unpaired@0.1": {"loss": "aot_unpaired", "smoothing": 0.1},
    "forward_kl": {"divergence": "forward_kl"},
    "js_divergence": {"divergence": "js_divergence"},
    "alpha_divergence": {"divergence": "alpha_divergence", "divergence_alpha": 0.7},
    "ld@0.5": {"desensitize": 0.5},
    "wpo": {"weigh": True},
    "mpo": {"loss": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1}},
}
"""Sections of the losses whose golden name is not that of a loss alone."""
DPO = {
    f"dpo/{name}": {"beta": 0.3} | SETTINGS.get(name, {"loss": name})
    for family, _, name in (known.partition("/") for known in GOLDEN_LOSSES)
    if family == "dpo"
}
CPO = {
    f"cpo/{kind}" + (f"@alpha={alpha}" if alpha else ""): {
        "loss": kind,
        "beta": 2.0,
        "reference": "none",
        "reward_alpha": alpha,
        "smoothing": 0.1 if kind in ("sigmoid", "simpo") else 0.0,
    }
    for kind in ("sigmoid", "hinge", "ipo", "simpo")
    for alpha in (0.0, 0.25)
}
ORPO = {"orpo": {"loss": "orpo", "beta": 0.1}}
NOT_IN_TRL: set[str] = set()
"""Losses that TRL does not have; tests of their own compare them with NumPy."""


def objective(**section):
    """The objective of a section, without data."""
    records = {"preference": "pairs", "unpaired": "labelled", "reward": "pairs"}
    source = {"kind": "function", "call": "maxstack.data.people:pairs"}
    cfg = tiny.config(
        model={"head": {"scores": section["kind"] == "reward"}},
        data={
            "sources": [source | {"record": {"kind": records[section["kind"]]}}],
            "packing": "fit",
        },
        objective=section,
    )
    return objective_of(cfg)


def rows_of_pairs(chosen, rejected):
    """Arrays [pairs, T] of chosen and rejected sequences as rows [pairs, 2 T]."""
    return jnp.concatenate([chosen, rejected], axis=1)


def paired(x):
    """An array of which the first half is chosen, the second half rejected, as rows."""
    half = len(x) // 2
    return rows_of_pairs(x[:half], x[half:])


def batch_of(mask):
    """Segments and positions of rows of pairs."""
    length = mask.shape[1] // 2
    segments = np.repeat([[1, 2]], length, axis=1).repeat(len(mask), axis=0)
    positions = np.tile(np.arange(length), (len(mask), 2))
    return {"mask": jnp.asarray(mask, jnp.float32), "segments": segments, "positions": positions}


def logps_of(logits):
    """log p of each next token."""
    logps = jax.nn.log_softmax(jnp.asarray(logits)[:, :-1])
    ids = ARRAYS["pairs/input_ids"]
    return jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]


def mean(objective, batch):
    """The loss of a batch with log-probabilities, as a step has it."""
    batch = objective.prepare(batch, jax.random.key(0))
    return objective.terms(batch).total.sum() / objective.weight(batch)


def assert_trls(name, value, gradients, *arrays):
    """A function of arrays has TRL's value and gradients."""
    given = [jnp.asarray(array, jnp.float32) for array in arrays]
    found, grads = jax.value_and_grad(value, tuple(range(len(given))))(*given)
    assert found == pytest.approx(GOLDEN_LOSSES[name], rel=CLOSE, abs=CLOSE)
    for gradient, array in zip(grads, gradients, strict=True):
        np.testing.assert_allclose(gradient, ARRAYS[f"{name}/{array}"], rtol=CLOSE, atol=CLOSE)


def test_every_preference_loss_is_compared_with_trl_or_numpy():
    names = [section.get("loss", "sigmoid") for section in (DPO | CPO | ORPO).values()]
    compared = {name for name in names if isinstance(name, str)}
    assert compared | NOT_IN_TRL == {*PREFERENCES}


@pytest.mark.parametrize("name", sorted(DPO))
def test_preference_losses_equal_trl(name):
    loss = objective(kind="preference", **DPO[name])
    mask = paired(ARRAYS["pairs/completion_mask"][:, 1:])

    def value(logits):
        batch = batch_of(mask) | {
            "logps": paired(logps_of(logits)),
            "reference_logps": paired(logps_of(ARRAYS["pairs/ref_logits"])),
        }
        logps = jax.nn.log_softmax(logits[:, :-1])
        batch["sharpness"] = paired(jax.nn.logsumexp(2 * logps, axis=-1))
        return mean(loss, batch)

    assert_trls(name, value, ["grad_logits"], ARRAYS["pairs/logits"])


@pytest.mark.parametrize("name", sorted(CPO | ORPO))
def test_losses_without_a_reference_equal_trl(name):
    loss = objective(kind="preference", **(CPO | ORPO)[name])

    def value(chosen, rejected):
        logps = rows_of_pairs(chosen[:, None], rejected[:, None])
        return mean(loss, batch_of(np.ones(logps.shape)) | {"logps": logps})

    arrays = [ARRAYS[f"{name}/{key}"] for key in ("chosen", "rejected")]
    assert_trls(name, value, ["grad_chosen", "grad_rejected"], *arrays)


@pytest.mark.parametrize("name", ["ipo", "sigmoid_norm", "simpo"])
def test_alphapo_of_means_over_tokens_does_not_depend_on_the_length(name):
    loss = objective(kind="preference", loss=name, reference="none", reward_alpha=0.25)
    found = []
    for length in (1, 40):
        logps = rows_of_pairs(np.full((1, length), -0.5), np.full((1, length), -1.0))
        found.append(float(mean(loss, batch_of(np.ones(logps.shape)) | {"logps": logps})))
    assert found[0] == pytest.approx(found[1], rel=CLOSE)


@pytest.mark.parametrize(("name", "loss"), [("kto", "kto"), ("apo_zero_unpaired", "apo_zero")])
@pytest.mark.slow
def test_losses_of_labelled_answers_equal_trl(name, loss):
    made = objective(
        kind="unpaired", loss=loss, beta=0.3, desirable_weight=1.2, undesirable_weight=0.9
    )
    mask = ARRAYS["pairs/completion_mask"][:, 1:]
    answers, length = mask.shape
    ones = np.ones((answers, 1))
    label = np.where(ARRAYS["kto/labels"], 1.0, -1.0)[:, None]

    def value(logits):
        batch = {
            "segments": np.concatenate([np.ones((answers, length)), 2 * ones], 1).astype(int),
            "mask": jnp.concatenate([mask, ones], 1),
            "label": jnp.concatenate([label * np.ones((1, length)), 0 * ones], 1),
            "mismatched": jnp.concatenate([np.zeros((answers, length)), ones], 1),
            "logps": jnp.concatenate([logps_of(logits), ARRAYS["kto/kl_logps"][:, None]], 1),
            "reference_logps": jnp.concatenate(
                [logps_of(ARRAYS["pairs/ref_logits"]), ARRAYS["kto/ref_kl_logps"][:, None]], 1
            ),
        }
        return mean(made, batch)

    assert_trls(f"kto/{name}", value, ["grad_logits"], ARRAYS["pairs/logits"])


@pytest.mark.parametrize(
    ("name", "section"),
    [("plain", {}), ("margin", {"margins": True}), ("centred", {"centre": 0.01})],
)
def test_reward_losses_equal_trl(name, section):
    made = objective(kind="reward", **section)
    margin = np.tile(ARRAYS["reward/margin"][:, None], (1, 2))

    def value(scores):
        rows = paired(scores)
        batch = batch_of(np.ones(rows.shape)) | {"ends": jnp.ones(rows.shape), "margin": margin}
        return made.sums(batch, rows)["loss"] / len(rows)

    assert_trls(f"reward/{name}", value, ["grad_scores"], ARRAYS["reward/scores"])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_of_distillation_equal_trl(beta, temperature):
    counted = ARRAYS["gkd/labels"] != -100

    def value(logits):
        student, teacher = (
            jax.nn.log_softmax(jnp.asarray(x, jnp.float32) / temperature)
            for x in (logits, ARRAYS["gkd/teacher"])
        )
        return (divergence(student, teacher, beta) * counted).sum() / counted.sum()

    assert_trls(f"gkd/{beta}@{temperature}", value, ["grad_logits"], ARRAYS["pairs/logits"])
