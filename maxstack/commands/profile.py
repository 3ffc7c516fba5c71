"""`maxstack profile`: where the time of a run's steps goes."""

import argparse
import sys

from maxstack.command import JSON, argument, check_writable, command, positive, write_json
from maxstack.commands.goodput import folder_of
from maxstack.errors import ConfigError


@command(
    "profile",
    "Where the time of a training step goes: busy and idle, by layer and direction, by line of "
    "source, by operation; collectives, waiting for input, memory. Reads the trace that "
    "train.profile wrote into the run's folder, or with --live takes one of a running job.",
    "profile runs/quickstart --json profile.json",
    argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, or the name of one in runs/; two are shown side by side",
    ),
    argument(
        "--trace",
        type=positive,
        metavar="STEP",
        help="the trace that begins at this step; by default the newest",
    ),
    argument(
        "--process",
        type=int,
        default=0,
        metavar="N",
        help="the process whose devices are shown, where several trained the run (default: 0)",
    ),
    JSON,
    argument(
        "--live",
        action="store_true",
        help="ask the running job for a trace of its next steps first; SIGUSR1 to it does the same",
    ),
    argument("--steps", type=positive, metavar="N", help="with --live: how many (default: 3)"),
    on_cpu=True,
)
def main(args: argparse.Namespace) -> None:
    """Print the profile of a run, or of two side by side."""
    _check(args)
    folders = [folder_of(name) for name in args.runs]
    from maxstack.profile import live, report
    from maxstack.profile.figures import summary

    trace = live.take(folders[0], args.steps or live.STEPS) if args.live else args.trace
    profiles = [summary(folder, trace, args.process) for folder in folders]
    sys.stdout.write(f"{(report.comparison if profiles[1:] else report.text)(*profiles)}\n")
    figures = [profile.json() for profile in profiles]
    write_json(args.json, figures if figures[1:] else figures[0])


def _check(args: argparse.Namespace) -> None:
    """ConfigError for arguments that do not go together."""
    check_writable("--json", args.json)
    if len(args.runs) > 2:
        raise ConfigError(f"RUN: {len(args.runs)} are given; one is shown, or two side by side")
    if args.live and (len(args.runs) > 1 or args.trace):
        raise ConfigError("--live: takes a trace of one run; leave out the second, and --trace")
    if args.steps and not args.live:
        raise ConfigError(f"--steps {args.steps}: is of a trace to take; give --live too")
