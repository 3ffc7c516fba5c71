"""Import and export a synthetic Llama of a given size and print the peak memory of each: `python
scripts/measure_import.py --gigabytes 4`."""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEAK = """
import resource, sys
from maxstack import cli
from maxstack.commands import convert
code = cli.run(getattr(convert, sys.argv[1]), sys.argv[2:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(code)
"""


def main() -> None:
    """Measure in a temporary folder."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example: python scripts/measure_import.py --gigabytes 4 --layers 16",
    )
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--layers", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        largest = synthetic(Path(folder) / "source", int(args.gigabytes * 1e9), args.layers)
        print(
            f"largest tensor {largest / 2**30:.3f} GiB, bound "
            f"{(3 * largest + 2**30) / 2**30:.3f} GiB"
        )
        for command in (
            ["import_model", "source", "--out", "run"],
            ["export_model", "run", "--out", "out"],
        ):
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", PEAK, *command],
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            print(
                f"{command[0]}: peak {int(done.stdout.splitlines()[-1]) / 2**30:.3f} "
                f"GiB, {time.perf_counter() - begin:.0f} s"
            )


def synthetic(folder: Path, size: int, layers: int, embed: int = 2048, vocab: int = 32000) -> int:
    """Write a bfloat16 Llama of about `size` bytes, its numbers a repeated block; -> bytes of its
    largest tensor."""
    folder.mkdir()
    hidden = (
        (size // 2 - 2 * vocab * embed - layers * 4 * embed * embed)
        // (3 * layers * embed)
        // 64
        * 64
    )
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": embed,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": embed // 128,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 1e4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        name: (vocab, embed) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    shapes["model.norm.weight"] = (embed,)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}{norm}.weight": (embed,)
            for norm in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{name}self_attn.{part}_proj.weight": (embed, embed) for part in "qkvo"}
        shapes |= {
            f"{name}mlp.gate_proj.weight": (hidden, embed),
            f"{name}mlp.up_proj.weight": (hidden, embed),
            f"{name}mlp.down_proj.weight": (embed, hidden),
        }
    header, at = {}, 0
    for name, shape in shapes.items():
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [at, at + 2 * math.prod(shape)],
        }
        at += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    block = bytes(range(64)) * (1 << 16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in range(0, at, len(block)):
            file.write(block[: min(len(block), at - begin)])
    return max(2 * math.prod(shape) for shape in shapes.values())


if __name__ == "__main__":
    main()
