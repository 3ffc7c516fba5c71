"""Makes tests/goldens/absent.json: for every golden folder of transformers and every key of its
config.json, nested ones of rotary positions too, what transformers reads where the key is absent.

A case is the path of the key, joined by a slash, with the values of transformers' configuration
that differ from those of the whole file. A key without which it refuses the file has none.
Needs transformers.

example: python scripts/make_absent_goldens.py --check
"""

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import arguments

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens"
FILE = GOLDENS / "absent.json"
NAMES = "architectures", "model_type", "transformers_version"


def main() -> int:
    """Write the file, or compare it; returns the exit code."""
    parser = arguments.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="compare; write nothing")
    check = parser.parse_args().check
    import transformers

    transformers.logging.set_verbosity_error()
    cases = {path.parent.name: _cases(path) for path in sorted(GOLDENS.glob("*/config.json"))}
    text = json.dumps({name: case for name, case in cases.items() if case}, indent=0) + "\n"
    if not check:
        FILE.write_text(text)
    same = FILE.read_text() == text
    print(f"{FILE.name}: {'same' if same else 'differs'}")
    return 0 if same else 1


def _cases(path: Path) -> dict[str, Any]:
    from huggingface_hub.errors import StrictDataclassError

    config = json.loads(path.read_text())
    if "model_type" not in config:  # of diffusers
        return {}
    whole, cases = _completed(config), {}
    for keys in _paths(config):
        if keys[0] in NAMES:
            continue
        less = copy.deepcopy(config)
        holder = less
        for key in keys[:-1]:
            holder = holder[key]
        del holder[keys[-1]]
        try:
            read = _completed(less)
        except (StrictDataclassError, KeyError):
            continue
        names = sorted({*whole, *read})
        cases["/".join(keys)] = {
            name: read.get(name) for name in names if read.get(name) != whole.get(name)
        }
    return cases


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json as transformers' class reads it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    of_type = CONFIG_MAPPING[config["model_type"]]
    read = json.loads(json.dumps(of_type.from_dict(copy.deepcopy(dict(config))).to_dict()))
    return {key: value for key, value in read.items() if key not in NAMES}


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Paths of all keys, and of those inside of rope_parameters."""
    yield from ((key,) for key in config)
    for key, value in (config.get("rope_parameters") or {}).items():
        yield "rope_parameters", key
        if isinstance(value, Mapping):
            yield from (("rope_parameters", key, inner) for inner in value)


if __name__ == "__main__":
    sys.exit(main())
