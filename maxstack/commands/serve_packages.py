"""`maxstack serve` for packages: the Open Inference Protocol."""

import argparse
import asyncio
import gc
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from maxstack.command import argument, positive, up_to
from maxstack.commands.serve_connections import listen
from maxstack.errors import ConfigError

LARGEST_BATCH = 65536
LONGEST_WAIT = 10_000_000
"""Microseconds for which a request may wait for others."""
DAY = 86400


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Numbers of rows, separated by commas, as the type of an argument."""
    sizes = sorted({positive(word.strip()) for word in text.split(",")})
    if sizes[-1] > LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{sizes[-1]} is above {LARGEST_BATCH}")
    return tuple(sizes)


FLAGS = (
    argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="N,N",
        help="for packages: rows of a batch where the program takes any number (default: "
        "1,2,4,8,16,32)",
    ),
    argument(
        "--batch-timeout",
        type=up_to(LONGEST_WAIT),
        metavar="US",
        help="for packages: microseconds that a request waits for others to share its batch "
        "(default: 2000)",
    ),
    argument(
        "--queue",
        type=positive,
        metavar="N",
        help="for packages: requests of a signature that may wait; more get status 503 (default: "
        "250)",
    ),
    argument(
        "--poll",
        type=up_to(DAY),
        metavar="S",
        help="for packages: seconds between looks for newer versions; 0: when a client says load "
        "(default: 2)",
    ),
)
OF_PACKAGES = "batch_sizes", "batch_timeout", "queue", "poll"
OF_RUNS = "served_model_name chat_template tool_parser weights allow_nonfinite".split()


def are_packages(folders: Sequence[str]) -> bool:
    """True where all folders are packages, or folders of their versions. ConfigError where some
    are."""
    from maxstack.inference.packages.folders import is_served

    found = [is_served(Path(folder)) for folder in folders]
    if any(found) and not all(found):
        other = folders[found.index(False)]
        raise ConfigError(
            f"{other}: is no package, and other folders are; serve it by a process of its own"
        )
    return all(found)


def refuse_flags(args: Namespace, names: Sequence[str], of: str) -> None:
    """ConfigError for flags that are not of what is served."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise ConfigError(f"--{name.replace('_', '-')}: is of {of}; leave it out")


def serve_packages(
    folders: Sequence[str], args: Namespace, keys: Sequence[bytes], hosts: Sequence[str]
) -> None:
    """Serve packages until SIGTERM or Ctrl-C, to clients with one of `keys`, by one of the names
    `hosts`."""
    from maxstack.hardware.compiling import keep_programs
    from maxstack.inference.packages.app import make_app
    from maxstack.inference.packages.batching import Settings
    from maxstack.inference.packages.language import languages, mount
    from maxstack.inference.packages.repository import Repository
    from maxstack.inference.server.access import Access
    from maxstack.inference.server.process import serve
    from maxstack.schema.config import RunConfig

    refuse_flags(args, OF_RUNS, "a run or a Hugging Face folder")
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]}: a package has no values to replace; leave it out")
    usual = Settings()
    settings = Settings(
        args.batch_sizes or usual.sizes,
        usual.timeout if args.batch_timeout is None else args.batch_timeout / 1e6,
        args.queue or usual.queue,
    )
    kept = RunConfig.model_fields["compilation_cache"].default
    keep_programs(os.environ.get("JAX_COMPILATION_CACHE_DIR", kept))
    listener = listen(args)
    poll = 2.0 if args.poll is None else args.poll
    gc.freeze()  # modules, so that the collection after a version's end is quick
    repository = Repository([Path(folder) for folder in folders], settings, poll)
    access = Access(keys, hosts)
    app, found = make_app(repository, access), languages(repository, settings.queue, access)
    if found:
        mount(app, found)

    async def drain() -> None:
        await asyncio.gather(repository.drain(), *(each.service.drain() for each in found))

    def said(origin: str) -> str:
        lines = [f"{', '.join(repository.names)}: {origin}/v2"]
        if found:
            lines.append(f"{found[0].name}: {origin}/v1, and in a browser {origin}")
        lines += [f"{each.name}: {origin}/models/{each.name}/v1" for each in found[1:]]
        return "\n".join(lines)

    serve(app, listener, said, drain, args.grace)
