"""`maxstack package`, `maxstack package verify`: a model as a folder that needs no maxstack."""

import argparse
import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from maxstack.command import (
    ALLOW_NONFINITE,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    command,
    local_folder,
    model_overrides,
    positive,
    up_to,
)
from maxstack.errors import ConfigError, installing
from maxstack.hardware import devices

PLATFORMS = "cpu", "tpu", "cuda", "rocm"


def listed(text: str) -> list[str]:
    """Words between commas, as the type of an argument."""
    return [word for word in text.split(",") if word]


def platforms(text: str) -> list[str]:
    """Platforms between commas."""
    words = listed(text)
    if not words or not {*words} <= {*PLATFORMS}:
        raise argparse.ArgumentTypeError(f"{text}: give some of {', '.join(PLATFORMS)}")
    return words


def lengths(text: str) -> list[int]:
    """Lengths between commas."""
    return [positive(word) for word in listed(text)]


@command(
    "package",
    "Write a model as a folder of programs and weights that runs without maxstack, or check one "
    "(maxstack package verify FOLDER).",
    "package runs/quickstart --out boxes/quickstart/1 --platforms cpu,tpu,cuda",
    MODEL,
    OVERRIDES,
    argument("--out", required=True, type=local_folder, metavar="FOLDER", help="a new folder"),
    argument(
        "--name",
        help="of the package (default: the name of FOLDER, or of the one around a "
        "version such as 1)",
    ),
    argument(
        "--platforms",
        type=platforms,
        default=["cpu", "tpu", "cuda"],
        metavar="P,P",
        help="devices that are to run it: cpu, tpu, cuda, rocm (default: cpu,tpu,cuda)",
    ),
    argument(
        "--signature",
        type=listed,
        default=[],
        metavar="S,S",
        help="functions: score, embed, prefill, logits, decode, reward; classify, embed; sample "
        "(default: all that the model has)",
    ),
    argument(
        "--lengths",
        type=lengths,
        default=[],
        metavar="N,N",
        help="tokens of texts that score and embed are made for; shorter ones are padded (default: "
        "the longest, and quarters of it)",
    ),
    argument("--devices", type=positive, default=1, help="over which it is split (default: 1)"),
    argument("--steps", type=positive, default=50, help="of sample (default: 50)"),
    argument("--solver", choices=("euler", "heun"), default="euler", help="of sample"),
    argument("--guidance", type=up_to(100), default=1.0, help="of sample (default: 1, none)"),
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
        raise ConfigError(f"{args.model}: is a package already; give what it was made of")
    out: Path = args.out
    name = args.name or (out.resolve().parent if out.name.isdecimal() else out).name
    if "/" in name or name != name.strip():
        raise ConfigError(f"--name {name}: stands in addresses; leave out / and spaces around it")
    said = "run.virtual_devices="
    for count in [word.removeprefix(said) for word in args.overrides if word.startswith(said)]:
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
            f"--out {out}: {error.filename} went away meanwhile: does another command write there?"
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
    "Check every file of a package and that its programs can be read here; with --topology, that "
    "the compiler of other hardware takes them too (extras plan-tpu, plan-cuda).",
    "package verify boxes/quickstart/1 --topology v5e:1x1",
    argument("folder", type=local_folder, metavar="FOLDER"),
    argument("--topology", help="v5e:1x1, h100:1x1, ...: also compile the programs for it"),
)
def verify(args: Namespace) -> None:
    """Check the package. ConfigError where it is damaged."""
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
        versions = f"; there are versions: {', '.join(sorted(numbers))}" if numbers else ""
        here = args.topology is None and "made for" in str(error)
        other = "; --topology is for devices that are not here" if here else ""
        raise ConfigError(f"{error}{versions}{other}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder}/manifest.json: is malformed: {error!r}") from error
    print(
        f"{folder}: {manifest['name']}: {len(manifest['files'])} files are whole; "
        f"{', '.join(manifest['signatures'])} for {', '.join(manifest['platforms'])}; "
        f"good until {manifest['good_until']}"
    )


def _compile(folder: Path, name: str) -> None:
    """A line for each program as the compiler of a topology makes it."""
    from maxstack.package.compilation import compile_programs
    from maxstack.plan import topology

    for file, memory, flops in compile_programs(folder, topology.parse(name)):
        print(f"{file}: {flops / 1e6:,.1f} MFLOP, {memory / 2**20:,.1f} MiB beside arguments")


def main(argv: Sequence[str]) -> int:
    """`package verify FOLDER`, or `package MODEL`."""
    return verify(argv[1:]) if argv[:1] == ["verify"] else _write(argv)
