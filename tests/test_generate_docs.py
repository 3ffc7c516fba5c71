import re
import subprocess
import sys
from pathlib import Path

from maxstack.config.annotations import item, kinds, members, of_field, section
from maxstack.config.compose import presets_dir
from maxstack.schema.cluster import ClusterConfig
from maxstack.schema.config import Config

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = presets_dir() / "defaults.yml"


def test_defaults_yml_and_config_md_are_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/generate_docs.py", "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def keys(model, seen) -> set[str]:
    """Every key that may stand below a section, whatever its kind."""
    if model in seen:
        return set()
    seen.add(model)
    found = set(model.model_fields)
    for field in model.model_fields.values():
        for member in members(of_field(field)):
            inner = member if kinds(member) or section(member) else item(member)
            for below in [*kinds(inner).values(), *([section(inner)] if section(inner) else [])]:
                found |= keys(below, seen)
    return found


def test_every_key_but_the_models_stands_in_defaults_yml():
    text, seen = DEFAULTS.read_text(), set()
    for name, field in Config.model_fields.items():
        if name in ("model", "teacher"):
            continue
        block = re.search(rf"^(# )?{name}:.*\n(?:(?:[ #].*)?\n)*", text, re.MULTILINE)[0]
        written = set(re.findall(r"^[# -]*(\w+):", block, re.MULTILINE))
        inner = section(of_field(field))
        assert (keys(inner, seen) if inner else set()) - written - inherited(block) == set(), name


def inherited(block: str) -> set[str]:
    """Keys of kinds that are said to be as above."""
    return {key for line in re.findall(r"# ([\w, ]+): as above", block) for key in line.split(", ")}


def test_every_section_and_key_stands_in_config_md():
    text = (ROOT / "docs/CONFIG.md").read_text()
    assert keys(Config, set()) | keys(ClusterConfig, set()) == set(
        re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    )
