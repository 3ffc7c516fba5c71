"""absent.json: for every golden folder of transformers and every key of its config.json, nested
ones of rotary positions too, what transformers reads where the key is absent.

A case is the path of the key, joined by slashes, with the values of transformers' configuration
that differ from those of the whole file. A key without which it refuses the file has none.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from make_goldens import GOLDENS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NAMES, CLOSE = ["absent"], 0.0
SKIPPED = "architectures", "model_type", "transformers_version"


def make(name: str, out: Path) -> None:
    """Write the file."""
    transformers.logging.set_verbosity_error()
    found = {path.parent.name: cases(path) for path in sorted(GOLDENS.glob("*/config.json"))}
    text = json.dumps({family: each for family, each in found.items() if each}, indent=0)
    (out / "absent.json").write_text(text + "\n")


def cases(path: Path) -> dict[str, Any]:
    """The cases of one config.json; none for diffusers, which knows no model_type."""
    config = json.loads(path.read_text())
    if "model_type" not in config:
        return {}
    whole, found = completed(config), {}
    for keys in paths(config):
        if keys[0] in SKIPPED:
            continue
        less = copy.deepcopy(config)
        holder = less
        for key in keys[:-1]:
            holder = holder[key]
        del holder[keys[-1]]
        try:
            read = completed(less)
        except (StrictDataclassError, KeyError):
            continue
        names = sorted({*whole, *read})
        found["/".join(keys)] = {
            name: read.get(name) for name in names if read.get(name) != whole.get(name)
        }
    return found


def completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers' class reads it."""
    of_type = CONFIG_MAPPING[config["model_type"]]
    read = json.loads(json.dumps(of_type.from_dict(copy.deepcopy(dict(config))).to_dict()))
    return {key: value for key, value in read.items() if key not in SKIPPED}


def paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of all keys, and of those inside rope_parameters."""
    yield from ((key,) for key in config)
    for key, value in (config.get("rope_parameters") or {}).items():
        yield "rope_parameters", key
        if isinstance(value, Mapping):
            yield from (("rope_parameters", key, inner) for inner in value)
