"""`maxstack serve` for packages, over the Open Inference Protocol."""

import argparse
import asyncio
import gc
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxstack.command import argument, between, positive
from maxstack.commands.serve_connections import listen
from maxstack.errors import ConfigError

LARGEST_BATCH = 65536
LONGEST_WAIT = 10_000_000
"""Microseconds for which a request may wait for its batch."""
DAY = 86400


def _batch_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of rows, separated by commas, as the type of an argument."""
    sizes = sorted({positive(word.strip()) for word in text.split(",")})
    if sizes[-1] > LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{sizes[-1]} is above {LARGEST_BATCH}")
    return tuple(sizes)


FLAGS = (
    argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="N,N",
        help="packages: batch sizes to pad to if the program takes any number of rows (default: "
        "1,2,4,8,16,32)",
    ),
    argument(
        "--batch-timeout",
        type=between(0, LONGEST_WAIT),
        metavar="US",
        help="packages: maximum time to wait for a batch to fill, in microseconds (default: 2000)",
    ),
    argument(
        "--queue",
        type=positive,
        metavar="N",
        help="packages: queue length per signature; further requests get status 503 (default: 250)",
    ),
    argument(
        "--poll",
        type=between(0, DAY),
        metavar="S",
        help="packages: seconds between checks for new versions; 0: only on a client's request "
        "(default: 2)",
    ),
)
OF_PACKAGES = "batch_sizes", "batch_timeout", "queue", "poll"
OF_RUNS = "served_model_name chat_template tool_parser weights allow_nonfinite".split()


def are_packages(folders: Sequence[str]) -> bool:
    """Return True if all folders are packages or folders of their versions. ConfigError if only
    some are."""
    from maxstack.inference.packages.folders import is_served

    found = [is_served(Path(folder)) for folder in folders]
    if any(found) and not all(found):
        other = folders[found.index(False)]
        raise ConfigError(
            f"{other}: is not a package, but other folders are; serve it in a process of its own"
        )
    return all(found)


def refuse_flags(args: Namespace, names: Sequence[str], of: str) -> None:
    """ConfigError for flags that do not apply to what is served."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) is not False:
            raise ConfigError(f"--{name.replace('_', '-')}: applies to {of} only; leave it out")


def serve_packages(
    folders: Sequence[str], args: Namespace, keys: Sequence[bytes], hosts: Sequence[str]
) -> None:
    """Serve packages until SIGTERM or Ctrl-C, to clients with one of `keys`, under one of the names
    `hosts`."""
    from maxstack.hardware.compiling import keep_programs
    from maxstack.inference.packages.app import make_app
    from maxstack.inference.packages.batching import Settings
    from maxstack.inference.packages.language import languages, mount
    from maxstack.inference.packages.repository import Repository
    from maxstack.inference.server.admission import Access
    from maxstack.inference.server.process import serve
    from maxstack.schema.config import RunConfig

    refuse_flags(args, OF_RUNS, "a run or a Hugging Face folder")
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]}: a package has no config values; leave it out")
    given: dict[str, Any] = {"sizes": args.batch_sizes, "queue": args.queue}
    if args.batch_timeout is not None:
        given["timeout"] = args.batch_timeout / 1e6
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    kept = RunConfig.model_fields["compilation_cache"].default
    keep_programs(os.environ.get("JAX_COMPILATION_CACHE_DIR", kept))
    listener = listen(args)
    poll = 2.0 if args.poll is None else args.poll
    gc.freeze()  # the collection after a version is unloaded need not scan the modules
    repository = Repository([Path(folder) for folder in folders], settings, poll)
    access = Access(keys, hosts)
    app = make_app(repository, access)
    models = languages(repository, settings.queue, access)
    if models:
        mount(app, models)

    async def drain() -> None:
        await asyncio.gather(repository.drain(), *(each.service.drain() for each in models))

    def banner(origin: str) -> str:
        lines = [f"{', '.join(repository.names)}: {origin}/v2"]
        if models:
            lines.append(f"{models[0].name}: {origin}/v1, and in a browser {origin}")
        lines += [f"{each.name}: {origin}/models/{each.name}/v1" for each in models[1:]]
        return "\n".join(lines)

    serve(app, listener, banner, drain, args.grace)
