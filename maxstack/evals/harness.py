"""Runs lm-evaluation-harness with maxstack's scoring and engine, for tasks beyond the subset of its
format that maxstack reads."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic

from maxstack.config import storage
from maxstack.errors import ConfigError, installing, shortened
from maxstack.evals.scoring import Scored
from maxstack.evals.task import Likelihood, Task
from maxstack.evals.task_files import open_tasks, write_for_harness
from maxstack.evals.task_names import name_in
from maxstack.evals.tasks import Results, Tasks, join_likelihoods
from maxstack.schema.tasks import GenerationConfig, GroupConfig

MISSING = f"--lm-eval: lm-evaluation-harness is not installed: {installing('eval')}"
ALIASES = "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Other names of max_gen_toks."""


def evaluate(
    tasks: Tasks,
    params: Any,
    names: Sequence[str],
    limit: int | None,
    shots: int | None,
    library: str | None = None,
) -> Results:
    """Return the harness's results by task and group. `names` are files, shipped tasks, or tasks of
    the folder `library`, else of the harness. ConfigError where it is not installed or does not
    know a task."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise ConfigError(MISSING) from error
    with tempfile.TemporaryDirectory() as made:
        # The harness finds tasks by folders, so ours are written where it looks.
        folders = {made, *filter(None, [library])}
        asked: list[str] = []
        defaults = False
        for name in names:
            is_file = storage.kind(name) == "file"
            # What maxstack reads is given to the harness as a file, so that both ask the same
            # questions.
            if own := _read_here(name):
                write_for_harness(own, Path(made))
                asked.append(own[-1].name)
            elif is_file and (found := name_in(storage.read_whole(name).decode())):
                folders.add(os.path.dirname(os.path.abspath(name)))
                asked.append(found)
            else:
                asked.append(name)
                defaults = not library
        manager = TaskManager(include_path=sorted(folders), include_defaults=defaults)
        if unknown := [name for name in asked if not manager.match_tasks([name])]:
            raise ConfigError(f"--lm-eval: the harness knows no task {', '.join(unknown)}")
        try:
            # Read here once by itself, so that an error is known to be the task file's and not the
            # evaluation's.
            get_task_dict(asked, manager)
        except Exception as error:  # a task file may run any code
            what = shortened(f"{type(error).__name__}: {error}", 400)
            raise ConfigError(
                f"--lm-eval: the harness cannot read {', '.join(asked)}: {what}"
            ) from error
        os.environ["DISABLE_MULTIPROC"] = "1"  # its processes are forks, which jax's threads hang
        evaluated = lm_eval.simple_evaluate(
            model=_model(tasks, params),
            tasks=asked,
            task_manager=manager,
            limit=limit,
            num_fewshot=shots,
            log_samples=False,
            system_instruction=tasks.prompt_format.system or None,
            apply_chat_template=bool(tasks.prompt_format.template),
            fewshot_as_multiturn=tasks.prompt_format.multiturn,
        )
    return {name: _plain(metrics) for name, metrics in evaluated["results"].items()}


def _read_here(name: str) -> list[Task | GroupConfig]:
    """Return the tasks of a name if maxstack reads them: a shipped one, or a file of its subset."""
    try:
        return open_tasks([name])
    except ConfigError:
        if storage.kind(name) == "file" and not name.endswith(".yaml"):
            raise  # the harness reads .yaml files alone
        return []


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """Rename the harness's `acc,none` and `acc_stderr,none` to `acc` and `acc_stderr`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and "," in name
    }


def _model(tasks: Tasks, params: Any) -> Any:
    """Return the model as the harness calls it. Requests of a task are scored together, as without
    the harness, so that metrics are equal to the last digit."""
    from lm_eval.api.model import LM

    def by_task(requests: Sequence[Any], of: Callable[[list[Any]], list[Any]]) -> list[Any]:
        # By task, as maxstack scores: rows follow from the requests that are scored together.
        names = dict.fromkeys(request.task_name for request in requests)
        found: dict[int, Any] = {}
        for name in names:
            own = [i for i, request in enumerate(requests) if request.task_name == name]
            found |= dict(zip(own, of([requests[i].args for i in own]), strict=True))
        return [found[i] for i in range(len(requests))]

    def score(asked: list[list[Scored]]) -> list[Likelihood]:
        return [join_likelihoods(each) for each in tasks.score(params, asked, "scoring")]

    class Model(LM):
        tokenizer_name = tasks.texts.tokenizer.name

        def apply_chat_template(self, history: list[dict[str, str]], **how: Any) -> str:
            return tasks.prompt_format.render_messages(history, **how)

        def loglikelihood(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(pairs: list[Any]) -> list[Any]:
                found = score([[tasks.texts.pair(*pair)] for pair in pairs])
                return [(each.logprob, each.greedy) for each in found]

            return by_task(requests, of)

        def loglikelihood_rolling(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(texts: list[Any]) -> list[Any]:
                length = tasks.scorer.length
                pieces = [tasks.texts.windows(text, length) for (text,) in texts]
                return [each.logprob for each in score(pieces)]

            return by_task(requests, of)

        def generate_until(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(pairs: list[Any]) -> list[Any]:
                # Requests of one task share their generation_kwargs.
                cfg, until = _generation(pairs[0][1])
                prompts = [prompt for prompt, _ in pairs]
                return tasks.generator(params, prompts, cfg, until, "generating")

            return by_task(requests, of)

    return Model()


def _generation(given: dict[str, Any]) -> tuple[GenerationConfig, tuple[str, ...]]:
    """Return the harness's generation_kwargs as ours, and the strings that end an answer.
    ConfigError for those that are not supported."""
    words = {("max_gen_toks" if key in ALIASES else key): value for key, value in given.items()}
    until = words.get("until") or ()
    words["until"] = tuple([until] if isinstance(until, str) else until)
    try:
        cfg = GenerationConfig.model_validate(words)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"--lm-eval: generation_kwargs.{'.'.join(map(str, first['loc']))}: {first['msg']}; "
            f"known are {', '.join(GenerationConfig.model_fields)}"
        ) from error
    return cfg, words["until"]
