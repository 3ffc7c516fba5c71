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

from golden.trl_losses import Goldens, trainer

GROUP = 4
LENGTHS = np.array([6, 4, 2, 7, 5, 3, 6, 1, 4, 7, 2, 3])
REWARDS = np.array([1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 1.0, 0.5] + [0.5] * GROUP)
BETA = 0.05
CEILING = 1.1
"""Of a sampler's weights."""
LOSSES: dict[str, dict[str, Any]] = {
    **{
        kind + ("+kl" if beta else ""): {"loss_type": kind, "beta": beta}
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
        for beta in (0.0, BETA)
    },
    "gspo": {
        **{"loss_type": "grpo", "importance_sampling_level": "sequence"},
        **{"epsilon_low": 3e-4, "epsilon_high": 4e-4},
    },
    "gspo-wide": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "two-sided": {"delta": 1.1},
    "unbiased-kl": {"beta": BETA, "use_bias_correction_kl": True},
    "off-policy-mask": {"off_policy_mask_threshold": 0.05},
}
"""Attributes of a trainer, or of its arguments, other than the usual ones."""
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
    for name, options in LOSSES.items():
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
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "off_policy_mask_threshold": None,
        "max_completion_length": 16,
        "scale_rewards": "group",
        "normalize_advantages": False,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "top_entropy_quantile": 1.0,
        "current_gradient_accumulation_steps": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 1,
        "num_generations": GROUP,
        "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1),
        "reward_func_names": ["given"],
        "reward_clip_range": None,
        "per_device_train_batch_size": len(LENGTHS),
        "gradient_checkpointing_kwargs": None,
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "get_off_policy_mask": trl.GRPOTrainer.get_off_policy_mask,
        **dict.fromkeys(
            ("_entropy_bonus_enabled", "use_adaptive_entropy", "log_multimodal"), False
        ),
        **dict.fromkeys(("environment_factories", "environments", "tools"), None),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    } | options
    return trainer(args=SimpleNamespace(**usual), **usual)


FAMILIES = (add_arrays, losses, corrected, rloo, advantages)
