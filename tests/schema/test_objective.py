"""Faults of the objectives' own sections, and the tables of losses in the documentation."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from maxstack.config.compose import presets_dir
from maxstack.schema.config import Objective
from maxstack.schema.foreign import equivalent
from maxstack.schema.objective import PREFERENCES

DOCS = Path(__file__).parent.parent.parent / "docs"
SECTIONS = TypeAdapter(Objective)
PRESETS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (presets_dir() / "objectives").glob("*.yml")
}
OF_REWARDS = {name for name, section in PRESETS.items() if section["kind"] == "policy_gradient"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss": "hinge", "smoothing": 0.1}, "not used by hinge, only by sigmoid, robust, "),
        ({"gamma": 1.0}, "not used by sigmoid, only by simpo; leave it out, or set its default, "),
        ({"tau": 1.0}, "only by discopop"),
        ({"sft_on": "sequence"}, "only by sft"),
        ({"loss": "apo_zero", "divergence": "forward_kl"}, "not used by apo_zero"),
        ({"divergence_alpha": 0.7}, "not used by reverse_kl, only by alpha_divergence"),
        ({"divergence": "forward_kl", "reference": "none"}, "is from a reference"),
        ({"loss": {"orpo": 1, "sft": 1}, "reward_alpha": 0.1}, "not used by orpo and sft"),
        ({"loss": {"sigmoid": -1}}, "greater than or equal to 0"),
    ],
)
def test_keys_that_no_chosen_preference_loss_uses_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        SECTIONS.validate_python({"kind": "preference"} | section)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss": {"form": "sapo", "low": 0.1}}, "not used by sapo, only by clip"),
        ({"loss": {"form": "cispo", "dual": 3.0}}, "not used by cispo, only by clip"),
        ({"loss": {"cap": 2.0}}, "not used by clip, only by cispo"),
        ({"advantage": {"lam": 0.9}}, "not used by mean, only by value"),
        ({"value": {"weight": 1.0}}, "is for advantage.baseline=value"),
        ({"reference": "none", "kl": {"weight": 0.1}}, "use start or adapter_off, or kl.weight=0"),
    ],
)
def test_keys_that_the_policy_gradient_does_not_use_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        SECTIONS.validate_python({"kind": "policy_gradient"} | section)


@pytest.mark.parametrize("section", [{"kind": "preference", "loss": "hinge"}, *PRESETS.values()])
def test_a_runs_own_record_which_holds_every_key_opens(section):
    made = SECTIONS.validate_python(section)
    assert SECTIONS.validate_python(made.model_dump()) == made


@pytest.mark.parametrize(
    ("page", "names"), [("POSTTRAINING.md", {*PREFERENCES}), ("RL.md", OF_REWARDS)]
)
def test_every_loss_has_a_row_in_its_page(page, names):
    first_cells = re.findall(r"^\| (.+?) \|", (DOCS / page).read_text(), re.M)
    assert names <= {name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell)}


def test_every_preset_that_is_given_as_a_kind_is_explained():
    kinds = {section["kind"] for section in PRESETS.values()}
    assert [name for name in PRESETS if not equivalent(f"kind.{name}") and name not in kinds] == []
