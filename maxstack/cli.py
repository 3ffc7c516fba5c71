"""The console command: a table of commands, which are imported when they are called, and the
mapping of errors to exit codes."""

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
        "the same run as several processes, on this machine or a cluster",
    ),
    "status": ("maxstack.commands.submit:status", "how far what was submitted is"),
    "logs": ("maxstack.commands.submit:logs", "what it says"),
    "stop": ("maxstack.commands.submit:stop", "end it; it saves first"),
    "plan": (
        "maxstack.commands.plan:main",
        "whether a run fits its hardware, what it moves and how fast it can be, without "
        "the hardware",
    ),
    "kernels": (
        "maxstack.commands.kernels:main",
        "which kernel serves each op of a run, and why each other one does not",
    ),
    "tune": (
        "maxstack.commands.tune:main",
        "measure the kernels of a run on this device, and keep their best block sizes",
    ),
    "generate": ("maxstack.commands.generate:main", "go on from prompts by a trained model"),
    "serve": (
        "maxstack.commands.serve:main",
        "answer requests over HTTP by a trained model (OpenAI's API) or packages (Open Inference)",
    ),
    "sample": ("maxstack.commands.sample:main", "texts by a model trained by masked diffusion"),
    "eval": ("maxstack.commands.eval:main", "what a model is worth, by tasks or held-out data"),
    "score": (
        "maxstack.commands.score:main",
        "log-probabilities and perplexity of texts under a run or a Hugging Face folder",
    ),
    "quantize": (
        "maxstack.commands.quantize:main",
        "a trained model with weights in low precision, and what that changes; what a recipe takes",
    ),
    "lora": (
        "maxstack.commands.lora:main",
        "adapters in PEFT's format: out of runs, into and out of model folders",
    ),
    "import": ("maxstack.commands.convert:import_model", "a Hugging Face folder as a run"),
    "export": (
        "maxstack.commands.convert:export_model",
        "a run or checkpoint as a Hugging Face folder",
    ),
    "package": (
        "maxstack.commands.package:main",
        "a model as a folder of programs and weights that runs without maxstack",
    ),
    "checkpoint": (
        "maxstack.commands.checkpoint:main",
        "list, verify, show, copy and prune what a run has saved",
    ),
    "goodput": (
        "maxstack.commands.goodput:main",
        "where the time of a run went, over all its restarts",
    ),
    "profile": (
        "maxstack.commands.profile:main",
        "where the time of a run's steps goes, of a trace or of the running job",
    ),
    "report": (
        "maxstack.commands.report:main",
        "one HTML page about runs: curves, where the time went, faults, samples, differences",
    ),
    "data": (
        "maxstack.commands.data:main",
        "train a tokenizer, prepare token shards, show what the model is fed",
    ),
    "config": ("maxstack.commands.config:main", "show, compare and describe configurations"),
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
"""Commands of other programs, and ours for the same."""
EXAMPLE = "example: maxstack train quickstart train.steps=100 run.name=first"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `maxstack ARGV`."""
    return run(_dispatch, sys.argv[1:] if argv is None else argv)


def run(command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit code of a command: 1 for a user's error, 2 for bad data, each printed on stderr
    without a traceback. Other errors are bugs and are raised."""
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
    """True for an error of a path that a restart would meet again."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in LASTING


def _dispatch(argv: Sequence[str]) -> int:
    width = max(map(len, COMMANDS))
    table = "\n".join(f"  {name:<{width}}  {help}" for name, (_, help) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="maxstack",
        usage="maxstack COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"Train large models from YAML.\n\ncommands:\n{table}\n\n`maxstack COMMAND "
        "--help` says more.",
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
    """Exit code of a SystemExit; that of argparse for wrong usage is 2, which here means bad
    data."""
    if isinstance(stop.code, str):
        print(stop.code, file=sys.stderr)
        return 1
    return 1 if stop.code == 2 else stop.code or 0


if __name__ == "__main__":
    sys.exit(main())
