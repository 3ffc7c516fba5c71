"""`maxstack package` and `maxstack package verify`: write and check a model folder that runs
without maxstack."""

import argparse
import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from maxstack.command import (
    ALLOW_NONFINITE,
    GUIDANCE,
    MODEL,
    OVERRIDES,
    SOLVER,
    WEIGHTS,
    argument,
    command,
    local_folder,
    model_overrides,
    positive,
)
from maxstack.errors import ConfigError, installing
from maxstack.hardware import devices

PLATFORMS = "cpu", "tpu", "cuda", "rocm"


def listed(text: str) -> list[str]:
    """Split words at commas, as the type of an argument."""
    return [word for word in text.split(",") if word]


def platforms(text: str) -> list[str]:
    """Split platforms at commas."""
    words = listed(text)
    if not words or not {*words} <= {*PLATFORMS}:
        raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(PLATFORMS)}")
    return words


def lengths(text: str) -> list[int]:
    """Split lengths at commas."""
    return [positive(word) for word in listed(text)]


@command(
    "package",
    "Package a model as a folder of programs and weights that runs without maxstack. Check a "
    "package with `maxstack package verify FOLDER`.",
    "package runs/quickstart --out boxes/quickstart/1 --platforms cpu,tpu,cuda",
    MODEL,
    OVERRIDES,
    argument(
        "--out",
        required=True,
        type=local_folder,
        metavar="FOLDER",
        help="output folder, must not exist",
    ),
    argument(
        "--name",
        help="name of the package (default: the name of FOLDER, or of its parent if FOLDER is a "
        "version number)",
    ),
    argument(
        "--platforms",
        type=platforms,
        default=["cpu", "tpu", "cuda"],
        metavar="P,P",
        help="platforms to compile for: cpu, tpu, cuda, rocm (default: cpu,tpu,cuda)",
    ),
    argument(
        "--signature",
        type=listed,
        default=[],
        metavar="S,S",
        help="signatures to include, of score, embed, prefill, logits, decode, reward, classify "
        "and sample (default: all that the model has)",
    ),
    argument(
        "--lengths",
        type=lengths,
        default=[],
        metavar="N,N",
        help="sequence lengths of score and embed; shorter texts are padded (default: the model's "
        "longest and quarters of it)",
    ),
    argument(
        "--devices", type=positive, default=1, help="number of devices to shard over (default: 1)"
    ),
    argument("--steps", type=positive, default=50, help="sample: number of steps (default: 50)"),
    SOLVER,
    GUIDANCE,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def _write(args: Namespace) -> None:
    """Write the package."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ConfigError(
            f"maxstack package needs the flatbuffers package: {installing('package')}"
        )
    if (Path(args.model) / "manifest.json").is_file():
        raise ConfigError(
            f"{args.model}: is a package already; give the model that it was made from"
        )
    out: Path = args.out
    name = args.name or (out.resolve().parent if out.name.isdecimal() else out).name
    if "/" in name or name != name.strip():
        raise ConfigError(f"--name {name}: is part of URLs; leave out / and surrounding spaces")
    for override in args.overrides:
        key, _, count = override.partition("=")
        if key == "run.virtual_devices":
            devices.environment(int(count) if count.isdecimal() else None)
    from maxstack.package.contents import Options, open_contents, select_signatures
    from maxstack.package.writer import write

    options = Options(args.devices, args.lengths, args.steps, args.solver, args.guidance)
    contents = open_contents(args.model, model_overrides(args), options)
    signatures = select_signatures(contents.signatures, args.signature)
    try:
        manifest = write(out, name, contents, signatures, args.platforms)
    except FileNotFoundError as error:
        raise ConfigError(
            f"--out {out}: {error.filename} disappeared; is another command writing there?"
        ) from error
    count = sum(file["bytes"] for file in manifest["files"].values())
    for key, signature in manifest["signatures"].items():
        sizes = "; ".join(_sizes(program["sizes"]) for program in signature["programs"])
        print(f"{key}({', '.join(signature['inputs'])}): {sizes}")
    print(f"{args.model} -> {out}: {count / 1e6:,.1f} MB, good until {manifest['good_until']}")


def _sizes(sizes: dict[str, int | None]) -> str:
    return " ".join(f"{dim}={'any' if size is None else size}" for dim, size in sizes.items())


@command(
    "package verify",
    "Verify the checksums of a package and load its programs. With --topology, compile them for "
    "other hardware too (extras: plan-tpu, plan-cuda).",
    "package verify boxes/quickstart/1 --topology v5e:1x1",
    argument("folder", type=local_folder, metavar="FOLDER", help="folder of the package"),
    argument(
        "--topology", help="hardware to compile the programs for, such as v5e:1x1 or h100:1x1"
    ),
)
def verify(args: Namespace) -> None:
    """Verify the package. ConfigError where it is damaged."""
    from maxstack.package import loader

    folder: Path = args.folder
    try:
        if args.topology is None:
            package = loader.Package(folder)
            for signature in package.signatures.values():
                for program in signature.spec["programs"]:
                    _, (weights, *_) = signature.loaded(program["file"])
            package.weights(weights)
        else:
            _compile(folder, args.topology)
        manifest = loader.read_manifest(folder)
    except loader.PackageError as error:
        numbers = [
            path.name for path in folder.glob("[0-9]*") if (path / "manifest.json").is_file()
        ]
        advice = f"; give one of its versions: {', '.join(sorted(numbers))}" if numbers else ""
        if args.topology is None and "made for" in str(error):
            advice += "; use --topology for hardware that is not here"
        raise ConfigError(f"{error}{advice}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}/manifest.json: is malformed: {error!r}") from error
    print(
        f"{folder}: {manifest['name']}: {len(manifest['files'])} files are intact; "
        f"{', '.join(manifest['signatures'])} for {', '.join(manifest['platforms'])}; "
        f"good until {manifest['good_until']}"
    )


def _compile(folder: Path, name: str) -> None:
    """Compile each program for a topology, and print a line for it."""
    from maxstack.package.compilation import compile_programs
    from maxstack.plan import topology

    for file, memory, flops in compile_programs(folder, topology.parse(name)):
        print(f"{file}: {flops / 1e6:,.1f} MFLOP, {memory / 2**20:,.1f} MiB beyond its arguments")


def main(argv: Sequence[str]) -> int:
    """Run `package verify FOLDER`, or `package MODEL`."""
    return verify(argv[1:]) if argv[:1] == ["verify"] else _write(argv)
