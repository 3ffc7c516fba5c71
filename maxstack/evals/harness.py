"""lm-evaluation-harness over the same scoring and the same engine, for tasks that are beyond the
subset that is read here."""

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pydantic

from maxstack.config import storage
from maxstack.errors import ConfigError, installing, shortened
from maxstack.evals.scoring import Scored
from maxstack.evals.task import Likelihood, Task
from maxstack.evals.task_files import exported, open_tasks
from maxstack.evals.tasks import Results, Tasks, together
from maxstack.schema.tasks import GenerationConfig, GroupConfig

MISSING = f"--lm-eval: lm-evaluation-harness is not installed: {installing('eval')}"
ALIASES = "max_new_tokens", "max_tokens", "max_completion_tokens"
"""Other names of max_gen_toks."""
_NAME = re.compile(rb"^(?:task|group): *['\"]?([^'\"\s#]+)", re.M)


def evaluate(
    tasks: Tasks,
    params: Any,
    names: Sequence[str],
    limit: int | None,
    shots: int | None,
    library: str | None = None,
) -> Results:
    """The harness's results by task and group, of its own tasks, or those of a folder, by name and
    of files and shipped tasks. ConfigError where it is not installed or does not know a task."""
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as error:
        raise ConfigError(MISSING) from error
    with tempfile.TemporaryDirectory() as made:
        folders, asked, defaults = {made, *filter(None, [library])}, [], False
        for name in names:
            path = storage.kind(name) == "file"
            if own := _read_here(name):
                exported(own, Path(made))
                asked.append(own[-1].name)
            elif path and (found := _NAME.search(storage.read_whole(name))):
                folders.add(os.path.dirname(os.path.abspath(name)))
                asked.append(found[1].decode())
            else:
                asked.append(name)
                defaults = not library
        manager = TaskManager(include_path=sorted(folders), include_defaults=defaults)
        if unknown := [name for name in asked if not manager.match_tasks([name])]:
            raise ConfigError(f"--lm-eval: the harness knows no task {', '.join(unknown)}")
        try:
            get_task_dict(asked, manager)
        except Exception as error:  # whatever a file or its data leads to
            what = shortened(f"{type(error).__name__}: {error}", 400)
            raise ConfigError(
                f"--lm-eval: the harness cannot read {', '.join(asked)}: {what}"
            ) from error
        os.environ["DISABLE_MULTIPROC"] = "1"  # its processes are forks, which jax's threads hang
        found = lm_eval.simple_evaluate(
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
    return {name: _plain(metrics) for name, metrics in found["results"].items()}


def _read_here(name: str) -> list[Task | GroupConfig]:
    """The tasks of a name, where it is a shipped one or a file of the subset that is read here."""
    try:
        return open_tasks([name])
    except ConfigError:
        if storage.kind(name) == "file" and not name.endswith(".yaml"):
            raise  # the harness reads no file of another name
        return []


def _plain(metrics: dict[str, Any]) -> dict[str, float]:
    """The harness's `acc,none` and `acc_stderr,none` as `acc` and `acc_stderr`."""
    return {
        name.removesuffix(",none"): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and "," in name
    }


def _model(tasks: Tasks, params: Any) -> Any:
    """The model as the harness calls it. Requests of a task are scored together, as they are
    without the harness, so that numbers are equal to the last digit."""
    from lm_eval.api.model import LM

    def by_task(requests: Sequence[Any], of: Callable[[list[Any]], list[Any]]) -> list[Any]:
        names = dict.fromkeys(request.task_name for request in requests)
        found: dict[int, Any] = {}
        for name in names:
            own = [i for i, request in enumerate(requests) if request.task_name == name]
            found |= dict(zip(own, of([requests[i].args for i in own]), strict=True))
        return [found[i] for i in range(len(requests))]

    def scored(pieces: list[list[Scored]], what: str) -> list[Likelihood]:
        flat = iter(tasks.scorer(params, [each for part in pieces for each in part], what))
        return [together([next(flat) for _ in part]) for part in pieces]

    class Model(LM):
        tokenizer_name = tasks.texts.tokenizer.name

        def apply_chat_template(self, history: list[dict[str, str]], **how: Any) -> str:
            return tasks.prompt_format.render_messages(history, **how)

        def loglikelihood(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(pairs: list[Any]) -> list[Any]:
                found = scored([[tasks.texts.pair(*pair)] for pair in pairs], "scoring")
                return [(each.logprob, each.greedy) for each in found]

            return by_task(requests, of)

        def loglikelihood_rolling(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(texts: list[Any]) -> list[Any]:
                length = tasks.scorer.length
                pieces = [tasks.texts.windows(text, length) for (text,) in texts]
                return [each.logprob for each in scored(pieces, "scoring")]

            return by_task(requests, of)

        def generate_until(self, requests: list[Any], *_: Any, **__: Any) -> list[Any]:
            def of(asked: list[Any]) -> list[Any]:
                cfg, until = _generation(asked[0][1])
                prompts = [prompt for prompt, _ in asked]
                return tasks.generator(params, prompts, cfg, until, "generating")

            return by_task(requests, of)

    return Model()


def _generation(given: dict[str, Any]) -> tuple[GenerationConfig, tuple[str, ...]]:
    """The harness's generation_kwargs. ConfigError for those that are not served here."""
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
