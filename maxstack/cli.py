"""The console command: a table of commands, which are imported when called, and the exit codes of
errors."""

import argparse
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence

from maxstack.errors import LASTING, ConfigError, shortened

COMMANDS = {
    "train": ("maxstack.train:program", "train a model from one YAML file"),
    "submit": (
        "maxstack.commands.submit:submit",
        "start a run as several processes, on this machine or a cluster",
    ),
    "status": ("maxstack.commands.submit:status", "show the status of submitted jobs"),
    "logs": ("maxstack.commands.submit:logs", "print a job's logs"),
    "stop": ("maxstack.commands.submit:stop", "make a job save a checkpoint and stop"),
    "plan": (
        "maxstack.commands.plan:main",
        "predict, without the hardware, whether a run fits and how fast it can be",
    ),
    "kernels": (
        "maxstack.commands.kernels:main",
        "show which kernel each op of a run uses, and why not the others",
    ),
    "tune": (
        "maxstack.commands.tune:main",
        "benchmark a run's kernels on this device and save the best block sizes",
    ),
    "generate": ("maxstack.commands.generate:main", "generate text from prompts"),
    "serve": (
        "maxstack.commands.serve:main",
        "serve a model (OpenAI API) or packages (Open Inference Protocol) over HTTP",
    ),
    "sample": (
        "maxstack.commands.sample:main",
        "sample texts from a masked diffusion model, or images from a flow model",
    ),
    "eval": ("maxstack.commands.eval:main", "evaluate a model on tasks or held-out data"),
    "score": (
        "maxstack.commands.score:main",
        "compute the log-probabilities and perplexity of texts",
    ),
    "quantize": (
        "maxstack.commands.quantize:main",
        "quantize a model and report the quality change",
    ),
    "lora": (
        "maxstack.commands.lora:main",
        "export, merge and unmerge LoRA adapters in PEFT's format",
    ),
    "import": (
        "maxstack.commands.convert:import_model",
        "convert a Hugging Face model folder to a run",
    ),
    "export": (
        "maxstack.commands.convert:export_model",
        "convert a run or checkpoint to a Hugging Face model folder",
    ),
    "package": (
        "maxstack.commands.package:main",
        "package a model as compiled programs and weights that run without maxstack",
    ),
    "checkpoint": (
        "maxstack.commands.checkpoint:main",
        "list, verify, show, copy and prune a run's checkpoints",
    ),
    "goodput": (
        "maxstack.commands.goodput:main",
        "show where a run's time went, across all its restarts",
    ),
    "profile": (
        "maxstack.commands.profile:main",
        "show where a training step's time goes, from a trace or a running job",
    ),
    "report": (
        "maxstack.commands.report:main",
        "write an HTML report on one or more runs",
    ),
    "data": (
        "maxstack.commands.data:main",
        "train a tokenizer, prepare token shards, or show the model's input",
    ),
    "config": ("maxstack.commands.config:main", "show, compare or describe configurations"),
}
LONGEST_LINE = 3000
GUESSED = {
    **dict.fromkeys(("pretrain", "fit", "run"), "train CONFIG"),
    **dict.fromkeys(("sft", "finetune", "fine-tune"), "train sft model.from=FOLDER"),
    "dpo": "train dpo model.from=FOLDER",
    **dict.fromkeys(("grpo", "rl", "ppo"), "train grpo-sort, and docs/RL.md"),
    **dict.fromkeys(("chat", "infer", "inference", "predict"), "generate MODEL --chat"),
    **dict.fromkeys(("evaluate", "benchmark", "lm_eval"), "eval MODEL --tasks pairs,cloze"),
    "convert": "import FOLDER --out RUN, or export RUN --out FOLDER",
    "merge": "lora merge FOLDER --adapter ADAPTER --out FOLDER",
}
"""Commands of other programs -> ours for the same."""
EXAMPLE = "example: maxstack train quickstart train.steps=100 run.name=first"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `maxstack ARGV`; return the exit code."""
    return run(_dispatch, sys.argv[1:] if argv is None else argv)


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command; return its exit code: 1 for a user's error, 2 for bad data, each printed on
    stderr without a traceback. Other errors are bugs and are raised."""
    try:
        code = command(argv)
        sys.stdout.flush()
        return code
    except ValueError as error:
        if not hasattr(error, "exit_code"):
            raise
        return _fail(error, error.exit_code)
    except SystemExit as stop:
        return _usage_is_1(stop)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if not lasting(error):
            raise
        return _fail(OSError(f"{error.filename}: {error.strerror}"), 1)


def lasting(error: Exception) -> bool:
    """Return True for an error of a path that would recur after a restart."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in LASTING


def _dispatch(argv: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="maxstack",
        usage="maxstack COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Train, evaluate and serve models from YAML.\n\ncommands:\n{table}\n\nSee "
        "`maxstack COMMAND --help` for the options of a command.",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "--version", action="version", version=f"maxstack {importlib.metadata.version('maxstack')}"
    )
    parser.add_argument("command", help=argparse.SUPPRESS)
    if not argv:
        parser.print_help(sys.stderr)
        return 1
    name = parser.parse_args(argv[:1]).command
    if name not in COMMANDS:
        from maxstack.config.spelling import did_you_mean

        meant = f"; for that: maxstack {GUESSED[name]}" if name in GUESSED else ""
        raise ConfigError(
            f"no command {name}; the commands are "
            f"{', '.join(COMMANDS)}{meant or did_you_mean(name, COMMANDS)}"
        )
    return pkgutil.resolve_name(COMMANDS[name][0])(argv[1:])


def _fail(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"error: {shortened(line, LONGEST_LINE)}", file=sys.stderr)
    return code


def _usage_is_1(stop: SystemExit) -> int:
    """Return the exit code of a SystemExit. argparse exits with 2 for wrong usage, which here means
    bad data."""
    if isinstance(stop.code, str):
        print(stop.code, file=sys.stderr)
        return 1
    return 1 if stop.code == 2 else stop.code or 0


if __name__ == "__main__":
    sys.exit(main())
