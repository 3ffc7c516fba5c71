"""Runs packages in a process where maxstack, flax, optax and orbax cannot be imported."""

import json
import sys
from pathlib import Path

import numpy as np


class Missing:
    """A finder of modules, before all others, that has none of these."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("maxstack", "flax", "optax", "orbax"):
            raise ImportError(f"{name} is not here")


def opened(folder):
    """A package, by its own copy of the loader."""
    sys.modules.pop("loader", None)
    sys.path.insert(0, str(folder))
    from loader import Package

    sys.path.remove(str(folder))
    return Package(folder)


def equal(package, signature, file):
    """True where the results of a signature have the bits of `file`."""
    kept = np.load(file)
    inputs = {name: kept[name] for name in package.signatures[signature].spec["inputs"]}
    results = package.signatures[signature](**inputs)
    return all(np.array_equal(array, kept[name]) for name, array in results.items())


def answers(package, prompts, count, **settings):
    """Tokens of answers to prompts: a prompt at a time into the cache, then all together."""
    prefill, logits, decode = (package.signatures[n] for n in ("prefill", "logits", "decode"))
    cache, tables, first = package.state(), package.tables(), []
    for request, prompt in enumerate(prompts, 1):
        same = np.full(len(prompt), request)
        results, cache = prefill(
            cache, tokens=prompt, positions=np.arange(len(prompt)), requests=same, **tables
        )
        last = logits(states=results["states"][-1:])["logits"]
        first.append(int(last.argmax()))
    tokens, every = [np.array(first)], np.arange(len(prompts))
    rows = {name: np.full(len(prompts), value) for name, value in settings.items()}
    seeds = np.zeros((len(prompts), 2), np.uint32)
    for step in range(count - 1):
        positions = np.array([len(prompt) for prompt in prompts]) + step
        results, cache = decode(
            cache,
            tokens=tokens[-1],
            positions=positions,
            requests=every + 1,
            seeds=seeds,
            **rows,
            **tables,
        )
        tokens.append(results["next"])
    return np.stack(tokens, 1).tolist()


GREEDY = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "choices": 0}

if __name__ == "__main__":
    sys.meta_path.insert(0, Missing())
    done = {}
    for name in sys.argv[1:]:
        package = opened(Path(name))
        done[name] = {
            file.stem.partition(".")[2]: equal(package, file.stem.partition(".")[2], file)
            for file in Path(name).parent.glob(f"{Path(name).name}.*.npz")
        }
        if "decode" in package.signatures:
            golden = np.load(Path(name).with_name(f"{Path(name).name}-greedy.npz"))
            prompts = [
                row[:length]
                for row, length in zip(golden["prompts"], golden["lengths"], strict=True)
            ]
            count = golden["tokens"].shape[1]
            made = answers(package, prompts, count, **GREEDY)
            done[name]["decode"] = made == golden["tokens"].tolist()
    print(json.dumps(done))
