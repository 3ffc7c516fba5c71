"""`maxstack eval`: evaluate a model on tasks or on held-out data."""

from argparse import Namespace
from typing import TYPE_CHECKING

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

TRUNCATED = "have more than {} tokens and are truncated on the left; raise --length"


@command(
    "eval",
    "Evaluate a model on tasks in lm-evaluation-harness's format or, without --tasks, a run on its "
    "own held-out data, with its own objective.",
    "eval runs/quickstart --tasks pairs,cloze",
    MODEL,
    OVERRIDES,
    argument(
        "--tasks",
        action="append",
        metavar="A,B.yaml",
        help="built-in tasks (pairs, cloze), task files, or tasks of --tasks-path; repeatable; see "
        "docs/EVALUATION.md",
    ),
    argument(
        "--tasks-path",
        metavar="FOLDER",
        help="folder of task files in lm-evaluation-harness's layout, whose tasks, groups and tags "
        "--tasks may name",
    ),
    argument(
        "--apply-chat-template",
        action="store_true",
        help="format prompts with the model's chat template; few-shot examples become turns",
    ),
    argument(
        "--system", default="", metavar="TEXT", help="system prompt at the start of every request"
    ),
    argument(
        "--fewshot-as-multiturn",
        nargs="?",
        const="true",
        choices=("true", "false"),
        help="with --apply-chat-template: false puts the examples into the question's own turn",
    ),
    argument(
        "--lm-eval",
        action="store_true",
        help="run lm-evaluation-harness itself (extra: eval); --tasks may name its tasks",
    ),
    argument("--limit", type=positive, metavar="N", help="only the first N questions of each task"),
    argument(
        "--length",
        type=positive,
        metavar="N",
        help="maximum tokens of a request; longer ones are truncated on the left (default: the "
        "run's data.seq_len, otherwise the model's maximum, up to 4096)",
    ),
    argument("--num-fewshot", type=int, metavar="N", help="with --lm-eval: number of shots"),
    BATCH_SIZE,
    argument("--out", metavar="FILE.jsonl", help="write every question with its answer"),
    JSON,
    WEIGHTS,
    ALLOW_NONFINITE,
)
def main(args: Namespace) -> None:
    """Evaluate and print a table of figures."""
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
        raise ConfigError(f"{', '.join(given)}: only valid with --tasks")
    from maxstack.library import evaluate
    from maxstack.report.table import table

    figures = evaluate(args.model, *model_overrides(args))

    print(table("lr", [(name, f"{value:,.6g}") for name, value in figures.items()]))
    write_json(args.json, {"model": args.model, "figures": figures})


def _by_tasks(args: Namespace) -> None:
    names = [name.strip() for name in ",".join(args.tasks).split(",") if name.strip()]
    if not names:
        raise ConfigError("--tasks: is empty; name tasks, such as --tasks pairs,cloze")
    if args.num_fewshot is not None and not args.lm_eval:
        raise ConfigError(
            "--num-fewshot: needs --lm-eval; otherwise set num_fewshot in the task's file"
        )
    if args.out and args.lm_eval:
        raise ConfigError("--out: does not work with --lm-eval; leave one of them out")
    if args.fewshot_as_multiturn == "true" and not args.apply_chat_template:
        raise ConfigError("--fewshot-as-multiturn: needs --apply-chat-template")
    from maxstack.evals.prompts import PromptFormat
    from maxstack.evals.task_files import open_tasks
    from maxstack.evals.tasks import check_finite, open_model_tasks

    opened = [] if args.lm_eval else open_tasks(names, library=args.tasks_path or "")
    prompt_format = PromptFormat(args.system, multiturn=args.fewshot_as_multiturn != "false")
    sizes = args.batch_size, args.length, args.limit
    tasks, params = open_model_tasks(
        args.model, model_overrides(args), opened, *sizes, prompt_format, args.apply_chat_template
    )
    for task in tasks.tasks:
        if cut := tasks.too_long(task):
            print(f"task {task.name}: {cut} requests {TRUNCATED.format(tasks.scorer.length)}")
    if args.lm_eval:
        from maxstack.evals.harness import evaluate

        found = evaluate(tasks, params, names, args.limit, args.num_fewshot, args.tasks_path)
        if tasks.scorer.cut:
            print(f"{tasks.scorer.cut} requests {TRUNCATED.format(tasks.scorer.length)}")
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
