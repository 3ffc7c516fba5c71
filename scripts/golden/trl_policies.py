"""TRL's own losses of policy gradients called on fixed arrays.

Its advantages, and the weights that correct for another sampler, come from the method that samples,
called with fixed samples, log-probabilities and rewards.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import trl
from make_goldens import TABLE

from golden.trl_losses import Goldens, trainer

GROUP = 4
LENGTHS = np.array([6, 4, 2, 7, 5, 3, 6, 1, 4, 7, 2, 3])
REWARDS = np.array([1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.5] + [0.5] * GROUP)
BETA = 0.05
CEILING = 1.1
"""Of a sampler's weights."""
ADVANTAGES: dict[str, tuple[type, dict[str, Any]]] = {
    **{
        f"grpo/{scale}": (trl.GRPOTrainer, {"scale_rewards": scale})
        for scale in ("group", "batch", "none")
    },
    "rloo": (trl.RLOOTrainer, {}),
    "rloo/normalized": (trl.RLOOTrainer, {"normalize_advantages": True}),
    "rloo+kl": (trl.RLOOTrainer, {"beta": BETA}),
}


def add_arrays(goldens: Goldens) -> None:
    """The arrays that go in: answers of different lengths, padded on the right."""
    draw = np.random.default_rng(1)
    shape = len(LENGTHS), LENGTHS.max()
    logps = -draw.exponential(1.0, shape)
    old = logps + draw.normal(0, 0.4, shape)
    goldens.arrays |= {
        "rl/logps": logps,
        "rl/old": old,
        "rl/ref": logps + draw.normal(0, 0.3, shape),
        "rl/sampler": old + draw.normal(0, 0.25, shape),
        "rl/mask": (np.arange(shape[1]) < LENGTHS[:, None]).astype(np.float64),
        "rl/advantages": draw.normal(0, 1, len(LENGTHS)),
        "rl/rewards": REWARDS,
    }


def losses(goldens: Goldens) -> None:
    """GRPO and its relatives."""
    for name, options in TABLE["policy_losses"].items():
        keep(goldens, name, options)


def corrected(goldens: Goldens) -> None:
    """DAPO's loss with weights of a sampler, and the weights."""
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        for floor in (None, 0.9):
            name = f"sampler-{mode}" + (f"@{floor}" if floor else "")
            options = {
                "use_vllm": True,
                "vllm_importance_sampling_mode": mode,
                "vllm_importance_sampling_clip_min": floor,
                "vllm_importance_sampling_clip_max": CEILING,
            }
            sampled = score(goldens, trl.GRPOTrainer, options)
            weights = sampled["importance_sampling_ratio"]
            goldens.arrays[f"rl/weights/{name.removeprefix('sampler-')}"] = weights.numpy()
            keep(goldens, name, {"use_vllm": True}, importance_sampling_ratio=weights)


def rloo(goldens: Goldens) -> None:
    """RLOO's loss, of ratios of whole answers."""
    old = (goldens.tensor("rl/old") * goldens.tensor("rl/mask")).sum(1)
    keep(goldens, "rloo", {"epsilon_high": 0.2}, trl.RLOOTrainer, old_logps=old)


def advantages(goldens: Goldens) -> None:
    """Advantages of rewards."""
    for name, (trainer_class, options) in ADVANTAGES.items():
        made = score(goldens, trainer_class, options)["advantages"]
        goldens.arrays[f"advantages/{name}"] = made.numpy()


def keep(
    goldens: Goldens,
    name: str,
    options: Mapping[str, Any],
    trainer_class: Any = trl.GRPOTrainer,
    **more: torch.Tensor,
) -> None:
    """Keep the loss and its gradient by log-probabilities."""
    logps = goldens.tensor("rl/logps").requires_grad_()
    mask = goldens.tensor("rl/mask")
    ids = torch.ones(logps.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask,
        "num_items_in_batch": mask.sum(),
        "advantages": goldens.tensor("rl/advantages"),
        "old_per_token_logps": goldens.tensor("rl/old"),
        "ref_per_token_logps": goldens.tensor("rl/ref"),
        "sampling_per_token_logps": goldens.tensor("rl/sampler"),
    }
    given = settings(options)
    given._get_per_token_logps_and_entropies = lambda *_, **__: (logps, 0 * mask, None)
    loss = trainer_class._compute_loss(given, None, inputs | more)
    goldens.keep(name if name == "rloo" else f"grpo/{name}", loss, logps=logps)


def score(goldens: Goldens, trainer_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the sampling method makes of the rewards and log-probabilities."""
    answers = [[1] * length for length in LENGTHS]
    texts = [""] * len(answers)
    pairs = zip(goldens.arrays["rl/sampler"], LENGTHS, strict=True)
    logps = [row[:length].tolist() for row, length in pairs]
    given = settings(options)
    given.ref_model = SimpleNamespace()
    given._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        goldens.tensor("rl/ref" if model is given.ref_model else "rl/old"),
        None,
        None,
    )
    given._calculate_rewards = lambda *_: goldens.tensor("rl/rewards")[:, None]
    if trainer_class is trl.GRPOTrainer:
        given._generate = lambda _: (answers, answers, None, texts, logps, {}, None, [])
    else:
        given._generate = lambda _: (answers, answers, texts)
    rows = [{"prompt": ""} for _ in answers]
    return trainer_class._generate_and_score_completions(given, rows)


def settings(options: Mapping[str, Any]) -> Any:
    """A trainer with `options` in place of the usual attributes."""
    usual = {
        **TABLE["policy_defaults"],
        "num_generations": GROUP,
        "reward_weights": torch.ones(1),
        "per_device_train_batch_size": len(LENGTHS),
        "get_off_policy_mask": trl.GRPOTrainer.get_off_policy_mask,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
    } | options
    return trainer(args=SimpleNamespace(**usual), **usual)


FAMILIES = (add_arrays, losses, corrected, rloo, advantages)
