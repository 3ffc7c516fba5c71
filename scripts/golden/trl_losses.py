"""TRL's own losses called on fixed arrays.

A loss of a trainer is called on an object that has what it reads and no more.
"""

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch  # noqa: E402
import trl  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from make_goldens import TABLE  # noqa: E402
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402

PAIRS = 6
LENGTH, VOCAB = 10, 11
PROMPTS = np.array([3, 2, 4, 3, 2, 4] * 2)
ANSWERS = np.array([5, 4, 3, 6, 2, 4, 6, 4, 3, 1, 5, 6])


class Given(torch.nn.Module):
    """A model of which the logits are the weights."""

    def __init__(self, logits: np.ndarray, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits, dtype=dtype))
        self.is_gradient_checkpointing = False

    def forward(self, labels: Any = None, fused_lm_head: bool = False, **_: Any) -> Any:
        """The logits; or as TRL's fused head has it, figures of the labels that are not -100."""
        if not fused_lm_head:
            return SimpleNamespace(logits=self.logits * 1.0, loss=None)
        logps = torch.log_softmax(self.logits, -1)[:, :-1]
        counted = labels[:, 1:] != -100
        picked = logps.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(
            log_probs=picked * counted,
            label_mask=counted,
            aux_loss=None,
            entropy=-(logps.exp() * logps).sum(-1) * counted,
            log_sum_sq_probs=torch.logsumexp(2 * logps, -1).detach() * counted,
            mean_logits=self.logits[:, :-1].mean(-1).detach() * counted,
            is_top1=(logps.argmax(-1) == labels[:, 1:]) & counted,
        )


class Goldens:
    """The fixed arrays, and what losses make of them."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}
        draw = np.random.default_rng(0)
        place, ends = np.arange(LENGTH), (PROMPTS + ANSWERS)[:, None]
        shape = 2 * PAIRS, LENGTH, VOCAB
        logits = draw.normal(0, 1.5, shape)
        mask = ((place >= PROMPTS[:, None]) & (place < ends)).astype(np.int64)
        ids = draw.integers(1, VOCAB, shape[:2])
        self.arrays: dict[str, np.ndarray] = {
            "pairs/input_ids": ids,
            "pairs/completion_mask": mask,
            "pairs/attention_mask": (place < ends).astype(np.int64),
            "pairs/logits": logits,
            "pairs/ref_logits": logits + draw.normal(0, 1.0, shape),
            "kto/labels": np.array([True, False, True, True, False, False] * 2),
            "kto/kl_logps": draw.normal(0.4, 0.5, 2 * PAIRS),
            "kto/ref_kl_logps": draw.normal(0.0, 0.5, 2 * PAIRS),
            "reward/scores": draw.normal(0, 1, (2 * PAIRS, 1)),
            "reward/margin": draw.uniform(0, 1, PAIRS),
            "gkd/teacher": logits + draw.normal(0, 1.5, shape),
            "gkd/labels": np.where(mask, ids, -100),
        }

    def tensor(self, name: str) -> torch.Tensor:
        """An array."""
        return torch.tensor(self.arrays[name])

    def keep(self, name: str, loss: torch.Tensor, **gradients: torch.Tensor) -> None:
        """The value of a loss, and its gradients by what they are of."""
        loss.backward()
        self.losses[name] = loss.item()
        for key, tensor in gradients.items():
            assert tensor.grad is not None
            self.arrays[f"{name}/grad_{key}"] = tensor.grad.numpy().astype(np.float32)

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch of chosen answers, and after them the rejected ones."""
        return {
            key: self.tensor(f"pairs/{key}")
            for key in ("input_ids", "attention_mask", "completion_mask")
        }

    def answer_logps(self, logits: str, weights: np.ndarray | float = 1.0) -> torch.Tensor:
        """Log-probability of each answer, of its tokens with such weights."""
        logps = torch.log_softmax(self.tensor(logits), -1)[:, :-1]
        picked = logps.gather(-1, self.tensor("pairs/input_ids")[:, 1:, None])[..., 0]
        weighed = self.arrays["pairs/completion_mask"] * weights
        return (picked * torch.tensor(weighed)[:, 1:]).sum(1)


def trainer(**attributes: Any) -> Any:
    """What the loss of a trainer reads of `self`."""
    given = {
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "accelerator": Accelerator(cpu=True),
        "aux_loss_enabled": False,
        "aux_loss_coef": 0.0,
        "ref_model": None,
        "precompute_ref_logps": True,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**given | attributes)


def preferences(goldens: Goldens) -> None:
    """Losses with a reference."""
    shorter = np.tile(np.minimum(*ANSWERS.reshape(2, PAIRS)), 2)[:, None]
    number = np.cumsum(goldens.arrays["pairs/completion_mask"], 1)
    for name, options in TABLE["preferences"].items():
        settings = {
            "loss_types": ["sigmoid"],
            "loss_weights": [1.0],
            "beta": 0.3,
            "label_smoothing": 0.0,
            "ld_alpha": None,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "use_weighting": False,
            "args": SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        } | options
        beyond = np.where(number <= shorter, 1.0, settings["ld_alpha"] or 1.0)
        # Its alpha divergence has no float64.
        dtype = torch.float32 if "alpha" in settings["f_divergence_type"] else torch.float64
        reference = goldens.answer_logps("pairs/ref_logits", beyond).to(dtype)
        model = Given(goldens.arrays["pairs/logits"], dtype)
        inputs = goldens.inputs() | {
            "ref_chosen_logps": reference[:PAIRS],
            "ref_rejected_logps": reference[PAIRS:],
        }
        loss = trl.DPOTrainer._compute_loss(trainer(**settings), model, inputs, False)
        goldens.keep(name, loss, logits=model.logits)


def without_reference(goldens: Goldens) -> None:
    """CPO's losses, SimPO and ORPO, of log-probabilities of pairs."""
    sums = goldens.answer_logps("pairs/logits").reshape(2, PAIRS).numpy()
    means = sums / ANSWERS.reshape(2, PAIRS)

    def of_pairs(values: np.ndarray, name: str) -> tuple[torch.Tensor, ...]:
        for key, array in zip(("chosen", "rejected"), values, strict=True):
            goldens.arrays[f"{name}/{key}"] = array
        return tuple(torch.tensor(array, requires_grad=True) for array in values)

    for kind in ("sigmoid", "hinge", "ipo", "simpo"):
        for alpha in (0.0, 0.25):
            name = f"cpo/{kind}" + (f"@alpha={alpha}" if alpha else "")
            chosen, rejected = of_pairs(means if kind in ("ipo", "simpo") else sums, name)
            given = trainer(
                loss_type=kind, beta=2.0, simpo_gamma=0.5, label_smoothing=0.1, alpha=alpha
            )
            loss = CPOTrainer.cpo_loss(given, chosen, rejected)[0].mean()
            goldens.keep(name, loss, chosen=chosen, rejected=rejected)
    chosen, rejected = of_pairs(means, "orpo")
    loss = -ORPOTrainer.odds_ratio_loss(trainer(beta=0.1), chosen, rejected)[0].mean()
    goldens.keep("orpo", loss, chosen=chosen, rejected=rejected)


def labelled(goldens: Goldens) -> None:
    """KTO's losses."""
    for kind in ("kto", "apo_zero_unpaired"):
        model = Given(goldens.arrays["pairs/logits"])
        given = trainer(
            loss_type=kind,
            beta=0.3,
            desirable_weight=1.2,
            undesirable_weight=0.9,
            calculate_KL=kind == "kto",
            _compute_kl_logps=lambda model, batch: goldens.tensor("kto/kl_logps"),
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        )
        inputs = goldens.inputs() | {
            "label": goldens.tensor("kto/labels"),
            "ref_logps": goldens.answer_logps("pairs/ref_logits"),
            "ref_KL_logps": goldens.tensor("kto/ref_kl_logps"),
        }
        loss = trl.KTOTrainer._compute_loss(given, model, inputs, False)
        goldens.keep(f"kto/{kind}", loss, logits=model.logits)


def rewards(goldens: Goldens) -> None:
    """Losses of scores of pairs."""
    margin = {"margin": goldens.tensor("reward/margin")}
    for name, extra, centre in (
        ("plain", {}, None),
        ("margin", margin, None),
        ("centred", {}, 0.01),
    ):
        model = Given(goldens.arrays["reward/scores"])
        given = trainer(args=SimpleNamespace(center_rewards_coefficient=centre))
        inputs = goldens.inputs() | extra
        del inputs["completion_mask"]
        loss = trl.RewardTrainer.compute_loss(given, model, inputs)
        goldens.keep(f"reward/{name}", loss, scores=model.logits)


def of_tokens(goldens: Goldens) -> None:
    """Divergences from a teacher, and dynamic fine-tuning."""
    labels = goldens.tensor("gkd/labels")
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        for temperature in (1.0, 2.0):
            student = goldens.tensor("pairs/logits").requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(
                student, goldens.tensor("gkd/teacher"), labels, beta, temperature
            )
            goldens.keep(f"gkd/{beta}@{temperature}", loss, logits=student)
    model = Given(goldens.arrays["pairs/logits"])
    given = trainer(
        args=SimpleNamespace(loss_type="dft", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    inputs = goldens.inputs() | {"labels": labels}
    del inputs["completion_mask"]
    loss = trl.SFTTrainer.compute_loss(given, model, inputs)
    goldens.keep("dft", loss, logits=model.logits)


FAMILIES = (preferences, without_reference, labelled, rewards, of_tokens)
