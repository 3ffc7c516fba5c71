"""`maxstack eval`: what a model is worth, on held-out data or by tasks."""

import contextlib
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from maxstack import strict_json
from maxstack.command import (
    ALLOW_NONFINITE,
    BATCH_SIZE,
    JSON,
    MODEL,
    OVERRIDES,
    WEIGHTS,
    argument,
    check_writable,
    command,
    model_overrides,
    positive,
    write,
    write_json,
)
from maxstack.errors import ConfigError

if TYPE_CHECKING:
    from maxstack.evals.tasks import Results

TOO_LONG = "have more than {} tokens, and lose their beginning; --length gives more"


@command(
    "eval",
    "Evaluate a model: by tasks in lm-evaluation-harness's format, or without --tasks, a run on "
    "its own held-out data by its own objective.",
    "eval runs/quickstart --tasks pairs,cloze",
    MODEL,
    OVERRIDES,
    argument(
        "--tasks",
        action="append",
        metavar="A,B.yaml",
        help="shipped tasks (pairs, cloze), files, and names of --tasks-path; see "
        "docs/EVALUATION.md",
    ),
    argument(
        "--tasks-path",
        metavar="FOLDER",
        help="tasks, groups and tags of the files of a folder, as of lm-evaluation-harness's tasks",
    ),
    argument(
        "--apply-chat-template",
        action="store_true",
        help="ask by the model's chat template, examples as turns of the conversation",
    ),
    argument("--system", default="", metavar="TEXT", help="the beginning of every prompt"),
    argument(
        "--fewshot-as-multiturn",
        nargs="?",
        const="true",
        choices=("true", "false"),
        help="with --apply-chat-template: false puts examples into the turn of the question",
    ),
    argument(
        "--lm-eval",
        action="store_true",
        help="by lm-evaluation-harness itself (the extra eval), whose own tasks --tasks may name",
    ),
    argument("--limit", type=positive, metavar="N", help="the first N questions of each task"),
    argument(
        "--length",
        type=positive,
        metavar="N",
        help="tokens of a request at most; longer ones lose their beginning (default: data.seq_len "
        "of a run, else what the model allows, up to 4096)",
    ),
    argument("--num-fewshot", type=int, metavar="N", help="with --lm-eval: examples, for all"),
    BATCH_SIZE,
    argument("--out", metavar="FILE.jsonl", help="write each question with its answer"),
    JSON,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: Namespace) -> None:
    """Print a table of figures."""
    check_writable("--out", args.out)
    check_writable("--json", args.json)
    if args.tasks is not None:
        _by_tasks(args)
        return
    wanted = {
        "--lm-eval": args.lm_eval,
        "--out": args.out,
        "--limit": args.limit,
        "--length": args.length,
        "--tasks-path": args.tasks_path,
        "--apply-chat-template": args.apply_chat_template,
        "--system": args.system,
        "--fewshot-as-multiturn": args.fewshot_as_multiturn,
    }
    if given := [name for name, value in wanted.items() if value]:
        raise ConfigError(f"{', '.join(given)}: of tasks; name some by --tasks")
    figures = _held_out(args.model, model_overrides(args))
    from maxstack.report.table import table

    print(table("lr", [(name, f"{value:,.6g}") for name, value in figures.items()]))
    write_json(args.json, {"model": args.model, "figures": figures})


def _by_tasks(args: Namespace) -> None:
    parts = (name.strip() for given in args.tasks for name in given.split(","))
    names = [name for name in parts if name]
    if not names:
        raise ConfigError("--tasks: is empty; name some, as in --tasks pairs,cloze")
    if args.num_fewshot is not None and not args.lm_eval:
        raise ConfigError("--num-fewshot: with --lm-eval; a task's file says num_fewshot itself")
    if args.out and args.lm_eval:
        raise ConfigError("--out: is of tasks that are asked without --lm-eval")
    if args.fewshot_as_multiturn == "true" and not args.apply_chat_template:
        raise ConfigError("--fewshot-as-multiturn: turns are --apply-chat-template's; give it too")
    from maxstack.evals.opened import ask, check_finite
    from maxstack.evals.prompts import PromptFormat
    from maxstack.evals.task_files import open_tasks

    opened = [] if args.lm_eval else open_tasks(names, library=args.tasks_path or "")
    prompt_format = PromptFormat(args.system, multiturn=args.fewshot_as_multiturn != "false")
    sizes = args.batch_size, args.length, args.limit
    tasks, params = ask(
        args.model, model_overrides(args), opened, *sizes, prompt_format, args.apply_chat_template
    )
    for task in tasks.tasks:
        if cut := tasks.too_long(task):
            print(f"task {task.name}: {cut} requests {TOO_LONG.format(tasks.scorer.length)}")
    if args.lm_eval:
        from maxstack.evals.harness import evaluate

        found = evaluate(tasks, params, names, args.limit, args.num_fewshot, args.tasks_path)
        if tasks.scorer.cut:
            print(f"{tasks.scorer.cut} requests {TOO_LONG.format(tasks.scorer.length)}")
    else:
        found, records = tasks.results(params, progress=True)
        check_finite(tasks.run, records)
        if args.out:
            write("--out", args.out, "".join(strict_json.write(each) + "\n" for each in records))
    _print(found)
    facts = {"model": args.model, "length": tasks.scorer.length, "questions": tasks.sizes}
    write_json(args.json, {**facts, "tasks": found})


def _print(found: "Results") -> None:
    from maxstack.evals.task_metrics import error_of, is_error
    from maxstack.evals.tasks import centered
    from maxstack.report.table import table

    rows = []
    for name, metrics in found.items():
        for metric, value in metrics.items():
            if metric != "centered" and not is_error(metric):
                error = metrics.get(error_of(metric))
                rows.append((name, metric, f"{value:.4f}", f"± {error:.4f}" if error else ""))
                name = ""
    if (mean := centered(found)) is not None:
        rows.append(("all", "centered", f"{mean:.4f}", ""))
    print(table("llrr", rows, ("task", "metric", "value", "")))


def _held_out(model: str, overrides: list[str]) -> dict[str, Any]:
    """Figures of a run by its own objective, data and tasks."""
    from maxstack.load import run_folder

    own = run_folder(model)
    if own is None:
        raise ConfigError(
            f"{model}: is no run, so it names no held-out data; give --tasks, or train.steps=... "
            "of a run that starts from it"
        )
    from maxstack import startup
    from maxstack.inference.trained_model import assemble_model, read_weights
    from maxstack.report.log import Log
    from maxstack.report.metrics import Writer

    run, _ = assemble_model(model, ["eval.every=1", *overrides], trains=True)
    with contextlib.ExitStack() as ending:
        _, maker = startup.open_feed(run, own, ending)
        silent = Log(own, run.cfg.train.steps, False), Writer(own, first=False)
        evaluation = startup.evaluator(run, *silent, startup.frozen_weights(run), maker)
        assert evaluation
        return evaluation.figures(0, read_weights(model, run, own))
