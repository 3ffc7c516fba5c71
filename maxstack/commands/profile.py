"""`maxstack profile`: show where the time of a run's steps goes."""

import argparse

from maxstack.command import JSON, argument, check_writable, command, positive, write_json
from maxstack.commands.goodput import folder_of
from maxstack.errors import ConfigError


@command(
    "profile",
    "Show where the time of a training step goes: busy and idle, by layer and direction, by source "
    "line and by operation; exposed collectives, waiting for input, memory. Reads the trace that "
    "train.profile wrote to the run's folder, or with --live takes one of a running job.",
    "profile runs/quickstart --json profile.json",
    argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run folder, or name of one in runs/; two runs are shown side by side",
    ),
    argument(
        "--trace",
        type=positive,
        metavar="STEP",
        help="the trace that starts at this step (default: the newest)",
    ),
    argument(
        "--process",
        type=int,
        default=0,
        metavar="N",
        help="process whose devices to show, if several trained the run (default: 0)",
    ),
    JSON,
    argument(
        "--live",
        action="store_true",
        help="first have the running job trace its next steps, as SIGUSR1 does",
    ),
    argument(
        "--steps",
        type=positive,
        metavar="N",
        help="with --live: number of steps to trace (default: 3)",
    ),
    on_cpu=True,
)
def main(args: argparse.Namespace) -> None:
    """Print the profile of a run, or of two side by side."""
    _check(args)
    folders = [folder_of(name) for name in args.runs]
    from maxstack.profile import live, report
    from maxstack.profile.analysis import summary

    trace = live.take(folders[0], args.steps or live.STEPS) if args.live else args.trace
    profiles = [summary(folder, trace, args.process) for folder in folders]
    figures = [profile.json() for profile in profiles]
    if len(profiles) == 2:
        print(report.comparison(*profiles))
        write_json(args.json, figures)
    else:
        print(report.text(profiles[0]))
        write_json(args.json, figures[0])


def _check(args: argparse.Namespace) -> None:
    """ConfigError for arguments that conflict."""
    check_writable("--json", args.json)
    if len(args.runs) > 2:
        raise ConfigError(f"RUN: give one run, or two to compare; there are {len(args.runs)}")
    if args.live and (len(args.runs) > 1 or args.trace):
        raise ConfigError("--live: traces one run; leave out the second run and --trace")
    if args.steps and not args.live:
        raise ConfigError(f"--steps {args.steps}: needs --live")
