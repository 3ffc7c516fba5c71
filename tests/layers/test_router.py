"""Choices, weights and losses of the router against loops over tokens."""

import numpy as np
import pytest

from maxstack.layers import router
from maxstack.schema.mlps import RouterConfig

CASES = {
    "softmax": ({}, 2),
    "softmax over all": ({"normalize": False, "scale": 1.5}, 3),
    "groups by their best": (
        {"normalize": False, "groups": 4, "top_groups": 2, "group_score": "max"},
        3,
    ),
    "groups by their two best": (
        {"score": "sigmoid", "selection_bias": True, "groups": 4, "top_groups": 2, "scale": 2.5},
        3,
    ),
    "groups of one": ({"score": "sigmoid", "groups": 8, "top_groups": 3}, 2),
    "sigmoid": ({"score": "sigmoid", "normalize": False}, 1),
    "all experts": ({"selection_bias": True}, 8),
}


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 2


def scored(cfg, logits):
    """Scores in float64."""
    if cfg.score == "sigmoid":
        return 1 / (1 + np.exp(-np.float64(logits)))
    e = np.exp(np.float64(logits) - logits.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def chosen_by_loop(cfg, top_k, scores, bias):
    """The experts of one token: sorted lists, no arrays."""
    key = [score + b for score, b in zip(scores, bias, strict=True)]
    allowed = range(len(key))
    if cfg.groups:
        size = len(key) // cfg.groups
        members = [range(g * size, (g + 1) * size) for g in range(cfg.groups)]
        counted = 1 if cfg.group_score == "max" else 2
        best = [sum(sorted(key[slice(group.start, group.stop)])[-counted:]) for group in members]
        kept = sorted(range(cfg.groups), key=lambda g: -best[g])[: cfg.top_groups]
        allowed = [e for g in kept for e in members[g]]
    return sorted(allowed, key=lambda e: -key[e])[:top_k]


@pytest.mark.parametrize(("fields", "top_k"), CASES.values(), ids=CASES)
def test_choices_and_weights_are_those_of_a_loop(fields, top_k):
    cfg, logits, scale = RouterConfig(**fields), draw(2, 7, 8), np.abs(draw(8, seed=2))
    bias = draw(8, seed=1) if cfg.selection_bias else np.zeros(8, np.float32)
    experts, weights = map(np.asarray, router.route(cfg, top_k, logits, bias, scale))
    for at in np.ndindex(2, 7):
        scores = scored(cfg, logits[at])
        wanted = chosen_by_loop(cfg, top_k, scores, bias)
        assert experts[at].tolist() == wanted
        share = scores[wanted] / (scores[wanted].sum() if cfg.normalize else 1.0)
        np.testing.assert_allclose(weights[at], share * cfg.scale * scale[wanted], rtol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.slow
def test_the_loss_is_that_of_a_loop_over_real_tokens(score):
    cfg, logits = RouterConfig(score=score, balance_loss=0.3, z_loss=0.2), draw(3, 6, 4)
    real = np.array([[True] * 6, [True, True, False, True, False, False], [False] * 6])
    experts, _ = router.route(cfg, 2, logits)
    wanted = 0.0
    for b in range(3):
        tokens = [t for t in range(6) if real[b, t]]
        share, mean = np.zeros(4), np.zeros(4)
        for t in tokens:
            scores = scored(cfg, logits[b, t])
            mean += scores / scores.sum() / len(tokens)
            share[np.asarray(experts)[b, t]] += 1 / (2 * len(tokens))
            wanted += 0.2 * np.log(np.exp(np.float64(logits[b, t])).sum()) ** 2
        wanted += 0.3 * 4 * (share @ mean) * len(tokens)
    counts = router.counts(experts, 4, real)
    np.testing.assert_allclose(router.loss(cfg, 2, logits, counts, real), wanted, rtol=1e-5)
    assert counts.sum(-1).tolist() == [12, 6, 0]
