"""A refusal whose advice is refused is a defect: what the message says to set, use or give is
followed, and the configuration is then accepted."""

import re

import pytest

from maxstack.errors import ConfigError
from maxstack.load import load

SFT, DPO, RECORD = "recipes/sft.yml", "recipes/dpo.yml", "data.sources.0.record="
EIGHT, VIT = "run.virtual_devices=8", "recipes/vit-digits.yml"
ODD = "model.cls=true"  # 17 tokens an image
REFUSED = [
    (SFT, ["objective=dpo"], "set {kind: pairs}", f"{RECORD}{{kind: pairs}}"),
    (DPO, ["objective=sft"], "set {kind: chat}", f"{RECORD}{{kind: chat}}"),
    (DPO, ["objective.reference=adapter_off"], "use start", "objective.reference=start"),
    ("recipes/masked-diffusion.yml", ["objective.mask_token=9999"], "2047", None),
    ("quickstart", ["lora={targets: []}"], "pattern", "lora.targets=['.*/mixer/(query|value)']"),
    ("recipes/vit-digits.yml", ["objective={kind: sft}"], "classify", "objective.kind=classify"),
    (VIT, [ODD, "mesh.tensor=2", EIGHT], "use mesh.tensor=1", "mesh.tensor=1"),
    (
        VIT,
        [ODD, "mesh.tensor=2", EIGHT],
        "or mesh.rules.residual: null",
        "mesh.rules.residual=null",
    ),
    (
        VIT,
        [ODD, "mesh.context=2", "mesh.context_kind=ulysses", EIGHT],
        "use mesh.context=1",
        "mesh.context=1",
    ),
    ("recipes/distill.yml", ["objective.kind=sft"], "use distill", "objective.kind=distill"),
    (
        "quickstart",
        ["optimizer.schedule={kind: wsd}"],
        "wsd needs warmup_steps and decay_steps",
        "optimizer.schedule.warmup_steps=5",
        "optimizer.schedule.decay_steps=5",
    ),
]
"""Configuration, what makes it refused, what the message says, and that as overrides; None: the
number in the words."""


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join(case[1]))
def test_what_a_refusal_says_to_do_is_accepted(case):
    name, overrides, words, *advice = case
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(name, overrides)
    if advice == [None]:
        advice = [f"{overrides[0].partition('=')[0]}={words}"]
    load(name, [*overrides, *advice])


def first(key: str, message: str) -> str:
    """The first way out that a line of a message about a size names, as an override."""
    said = re.search(r"use ([a-z_.]+=\d+)", message)
    return said[1] if said else f"{key}={re.findall(r'use .*?([0-9]+)', message)[0]}"


def last(key: str, message: str) -> str:
    """The rule that it names instead, if any."""
    rule = re.search(r"or (mesh\.rules\.\w+): null", message)
    return f"{rule[1]}=null" if rule else first(key, message)


@pytest.mark.parametrize(
    ("axis", "way"), [("fsdp", first), ("context", first), ("tensor", last), ("fsdp", last)]
)
def test_every_size_that_a_mesh_asks_for_at_once_is_accepted(axis, way):
    overrides = [f"mesh.{axis}=3", "run.virtual_devices=3", "mesh.data=1"]
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    faults = [line.split(": ", 2)[1:] for line in f"{refused.value}".splitlines()]
    load("quickstart", [*overrides, *dict.fromkeys(way(*fault) for fault in faults)])
