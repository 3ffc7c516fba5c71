"""Policy gradients on fixed arrays: losses, gradients and advantages against the numbers that TRL
1.16's own code gave (tests/goldens/trl), and what TRL no longer has against numpy."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from maxstack.objectives import advantages
from maxstack.objectives.objective import objective_of
from maxstack.objectives.policy_gradient import SURROGATES
from maxstack.schema.policy_gradient import AdvantageConfig, SurrogateConfig

FOLDER = Path(__file__).parent.parent / "goldens/trl"
GOLDEN_LOSSES = json.loads((FOLDER / "losses.json").read_text())["losses"]
ARRAYS = np.load(FOLDER / "arrays.npz")
CLOSE = 1e-5
MASK = ARRAYS["rl/mask"]
HIGHER = {"low": 0.2, "high": 0.28}
KL = {"weight": 0.05, "estimate": "k3"}
LOSSES = {
    "grpo": {"loss": HIGHER, "aggregate": "sequence"},
    "bnpo": {"loss": HIGHER, "aggregate": "token"},
    "dr_grpo": {"loss": HIGHER, "aggregate": "fixed"},
    "dapo": {"loss": HIGHER, "aggregate": "token"},
    "gspo": {"loss": {"ratio": "sequence", "low": 3e-4, "high": 4e-4}},
    "gspo-wide": {"loss": {"ratio": "sequence"} | HIGHER},
    "cispo": {"loss": {"form": "cispo", "cap": 1.2}, "aggregate": "token"},
    "sapo": {"loss": {"form": "sapo"}},
    "luspo": {"loss": {"ratio": "sequence"} | HIGHER, "aggregate": "sum"},
    "two-sided": {"loss": {"dual": 1.1} | HIGHER, "aggregate": "token"},
    "unbiased-kl": {"loss": HIGHER, "aggregate": "token", "kl": KL | {"corrected": True}},
    "off-policy-mask": {"loss": HIGHER, "aggregate": "token", "off_policy": 0.05},
}
LOSSES |= {f"{name}+kl": LOSSES[name] | {"kl": KL} for name in ("grpo", "bnpo", "dr_grpo", "dapo")}
LOSSES |= {
    f"sampler-{level}_{form}{suffix}": {
        "loss": HIGHER,
        "aggregate": "token",
        "correction": {"level": level, "form": form, "low": low, "high": 1.1},
    }
    for level in ("token", "sequence")
    for form in ("truncate", "mask")
    for low, suffix in ((0.0, ""), (0.9, "@0.9"))
}
LOSSES["rloo"] = {"loss": {"ratio": "product", "low": 0.2, "high": 0.2}}


def config(section, **changes):
    """A run that learns so from samples of 4 to a prompt."""
    return tiny.with_rollouts(objective=section, **changes)


def batch(**more):
    """The fixed arrays, a sample in each row."""
    rows = {
        "segments": jnp.asarray(MASK, jnp.int32),
        "mask": jnp.asarray(MASK, jnp.float32),
        "group": jnp.asarray(MASK * (1 + np.arange(len(MASK)) // 4)[:, None], jnp.int32),
        "reward": jnp.asarray(MASK * ARRAYS["rl/rewards"][:, None], jnp.float32),
        "old_logps": jnp.asarray(ARRAYS["rl/old"], jnp.float32),
        "reference_logps": jnp.asarray(ARRAYS["rl/ref"], jnp.float32),
        "sampler": jnp.asarray(ARRAYS["rl/sampler"], jnp.float32),
    }
    return rows | more


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_equal_trl(name):
    objective = objective_of(config(LOSSES[name]))
    given = jnp.asarray(ARRAYS["rl/advantages"][:, None] * MASK, jnp.float32)

    def value(logps):
        rows = batch(logps=logps, advantages=given)
        return objective.terms(rows).total.sum() / objective.weight(rows)

    result, gradient = jax.value_and_grad(value)(jnp.asarray(ARRAYS["rl/logps"], jnp.float32))
    known = name if name == "rloo" else f"grpo/{name}"
    assert result == pytest.approx(GOLDEN_LOSSES[known], rel=CLOSE, abs=CLOSE)
    np.testing.assert_allclose(
        gradient * MASK, ARRAYS[f"{known}/grad_logps"], rtol=CLOSE, atol=CLOSE
    )


def advantages_of(section, **more):
    objective = objective_of(config(section, rollout={"epochs": 2}))
    return objective.prepare(batch(**more), jax.random.key(0))["advantages"]


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        ({"form": "clip"}, [False, True, False, False], [False, False, True, False]),
        ({"form": "cispo", "cap": 1.5}, [False] * 4, [False, False, True, True]),
        ({"form": "sapo"}, [False] * 4, [False] * 4),
    ],
)
def test_clipped_tokens_are_reported(loss, low, high):
    """By clip only where the sign of A makes it hold r, by cispo whatever A is."""
    ratios, signs = jnp.array([0.5, 0.5, 2.0, 2.0]), jnp.array([1.0, -1.0, 1.0, -1.0])
    surrogate = SURROGATES[loss["form"]](SurrogateConfig(**loss), ratios, signs, jnp.log(ratios))
    assert surrogate.low.astype(bool).tolist() == low
    assert surrogate.high.astype(bool).tolist() == high


@pytest.mark.parametrize(
    ("name", "section", "more"),
    [
        ("grpo/group", {"scale": "group"}, {}),
        ("grpo/batch", {"scale": "batch"}, {}),
        ("grpo/none", {"scale": "none"}, {}),
        ("rloo", {"baseline": "others", "scale": "none"}, {}),
        (
            "rloo+kl",
            {"baseline": "others", "scale": "none"},
            {"kl": {"weight": 0.05, "estimate": "k1", "where": "return"}},
        ),
    ],
)
def test_advantages_equal_trl(name, section, more):
    """A penalty comes off the return before the baseline, as in TRL's RLOO."""
    made = advantages_of({"advantage": section} | more)
    wanted = ARRAYS[f"advantages/{name}"][:, None] * MASK
    np.testing.assert_allclose(made, wanted, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("baseline", ["mean", "others"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_teach_nothing(baseline, scale):
    """Twelve times 10000.3, whose sum float32 rounds."""
    made = advantages_of(
        {"advantage": {"baseline": baseline, "scale": scale}},
        reward=jnp.asarray(MASK * 10000.3, jnp.float32),
        group=jnp.asarray(MASK, jnp.int32),
    )
    assert np.all(np.asarray(made) == 0)


def test_rewards_of_tokens_are_whitened_returns():
    """REINFORCE++ (arXiv:2501.03262): what is left of reward and penalty, 0 in mean and 1 in
    deviation over all tokens."""
    section = {
        "advantage": {"baseline": "none", "scale": "none", "whiten": True},
        "kl": {"weight": 0.05, "estimate": "k1", "where": "reward"},
    }
    penalty = 0.05 * (ARRAYS["rl/old"] - ARRAYS["rl/ref"]) * MASK
    left = penalty[:, ::-1].cumsum(1)[:, ::-1]
    raw = (ARRAYS["rl/rewards"][:, None] - left)[MASK > 0]
    expected = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(
        np.asarray(advantages_of(section))[MASK > 0], expected, rtol=1e-4, atol=1e-5
    )


def test_generalized_advantages_pass_over_what_the_model_did_not_say():
    """Two samples in a row, the first with an environment's words in the middle: as if they were
    not there (Schulman et al. 2016, arXiv:1506.02438, eq. 16)."""
    cfg = AdvantageConfig(baseline="value", gamma=0.9, lam=0.8)
    mask = np.array([[0, 1, 1, 0, 0, 1, 0, 1, 1]], np.float32)
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2]])
    draw = np.random.default_rng(0)
    rewards, values = (draw.normal(size=mask.shape).astype(np.float32) for _ in range(2))
    made = advantages.generalized_advantages(
        cfg,
        jnp.asarray(rewards * mask),
        jnp.asarray(values),
        advantages.Samples(jnp.zeros(mask.shape), jnp.asarray(segments), segments, mask, 2),
    )
    expected = np.zeros(mask.shape)
    for tokens in ([1, 2, 5], [7, 8]):
        after = value = 0.0
        for t in reversed(tokens):
            after = rewards[0, t] + 0.9 * value - values[0, t] + 0.9 * 0.8 * after
            expected[0, t], value = after, values[0, t]
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


def test_values_are_held_near_what_they_were():
    """PPO's value loss: half the larger of two squares (Schulman et al. 2017)."""
    objective = objective_of(config({"advantage": {"baseline": "value", "scale": "none"}}))
    values, old, returns = jnp.array([1.0, 0.0, 0.5]), jnp.array([0.0, 0.0, 0.4]), jnp.ones(3)
    rows = {"old_values": old, "returns": returns}
    np.testing.assert_allclose(
        objective._value_loss(values, rows), [0.5 * 0.8**2, 0.5, 0.5 * 0.5**2], rtol=1e-6
    )


def test_the_teacher_rewards_each_token():
    """On-policy distillation: the advantage of a token is how much likelier the teacher finds
    it."""
    cfg = config({"distil": 0.5}, teacher=tiny.model(), rollout={"epochs": 2})
    objective = objective_of(cfg.model_copy(update={"rewards": ()}))
    rows = batch(reward=jnp.zeros(MASK.shape), teacher_logps=jnp.asarray(ARRAYS["rl/ref"]))
    made = objective.prepare(rows, jax.random.key(0))["advantages"]
    expected = 0.5 * (ARRAYS["rl/ref"] - ARRAYS["rl/old"]) * MASK
    np.testing.assert_allclose(made, expected, rtol=1e-5, atol=1e-6)


def test_samples_that_are_left_out_are_in_no_baseline():
    groups = np.array(batch()["group"])
    groups[1] = 0
    made = np.asarray(advantages_of({"advantage": {"scale": "none"}}, group=jnp.asarray(groups)))
    kept = ARRAYS["rl/rewards"][[0, 2, 3]]
    assert (made[1] == 0).all()
    np.testing.assert_allclose(made[[0, 2, 3], 0], kept - kept.mean(), rtol=1e-5, atol=1e-6)
