"""A task of evaluation: turns its documents into requests to a model, exactly as
lm-evaluation-harness does with the same file.

The question, the answer and the choices of a document are fields of it or templates, which run in
Jinja's sandbox. Before a question come the description and examples, drawn by one generator over
all documents. A request is a pair of context and continuation, a text to score, or a prompt."""

import ast
import dataclasses
import functools
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxstack.errors import DataError, quoted, shortened
from maxstack.evals.prompts import PLAIN, PromptFormat, Turn
from maxstack.schema.tasks import TaskConfig

Document = Mapping[str, Any]
EXAMPLES_SEED = 1234
"""lm-evaluation-harness's seed of the examples before questions."""
# Task files are downloaded, and a template can reach Python's internals without the sandbox.
# StrictUndefined: a misspelt field would become an empty text.
_TEMPLATES = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(
    pattern, by, text, count=count
)
_TEMPLATES.tests["none"] = lambda value: value is None or isinstance(value, Null)


class Null:
    """A null in a template: false, equal to None, and an error where it would be rendered."""

    def __init__(self, field: str):
        self.field = field

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, Null)

    def __str__(self) -> str:
        raise _lacking(self.field)

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError if name.startswith("_") else _lacking(self.field)


@dataclasses.dataclass(frozen=True)
class Question:
    """A document as requests."""

    document: Document
    pairs: tuple[tuple[str, str], ...] = ()
    """Contexts, and the continuation of each to score."""
    text: str = ""
    """The text to score as a whole, or the prompt."""
    choices: tuple[str, ...] = ()
    right: tuple[Any, ...] = ()
    """Numbers of the right choices, or the right answers."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation."""

    logprob: float
    """Log-probability in nats."""
    greedy: bool
    """True where each token is the likeliest one."""
    tokens: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its documents."""

    cfg: TaskConfig
    documents: Sequence[Document]
    examples: Sequence[Document]
    files: Mapping[str, list[str]]
    """The files of its documents, by split."""
    prompt_format: PromptFormat = PLAIN

    @property
    def name(self) -> str:
        return self.cfg.task

    @functools.cached_property
    def questions(self) -> list[Question]:
        """All questions, in the order of the documents. DataError for a document that does not fit
        the task."""
        # One generator for all documents in order, as in lm-evaluation-harness: a question's
        # examples depend on those drawn before.
        rng, made = random.Random(EXAMPLES_SEED), []
        for number, document in enumerate(self.documents):
            try:
                made.append(self._question(document, self._before(document, rng)))
            except Exception as error:  # a template may do anything
                raise DataError(
                    f"task {self.name}, document {number}: {_message(error)}; its fields "
                    f"are {', '.join(document)}"
                ) from error
        return made

    def _question(self, document: Document, before: list[Turn]) -> Question:
        cfg = self.cfg
        question, answer = self._text(document), self._target(document)
        choices = self._choices(document) if cfg.doc_to_choice is not None else ()

        def prompt(text: str) -> str:
            return self.prompt_format.render([*before, Turn("user", text)])

        if cfg.output_type == "loglikelihood_rolling":
            return Question(document, text=str(answer))
        if cfg.output_type == "generate_until":
            answers = answer if isinstance(answer, list | tuple) else (answer,)
            right = [choices[each] if choices else str(each) for each in answers]
            return Question(document, text=prompt(str(question)), right=(*right,))
        if cfg.output_type == "loglikelihood":
            return Question(document, pairs=((prompt(str(question)), str(answer)),))
        # A chat template ends the turn, so no delimiter stands before the answer.
        between = "" if self.prompt_format.template else cfg.target_delimiter
        if isinstance(question, int):  # the choices are questions, which all go on alike
            pairs = [(prompt(each), f"{between}{answer}") for each in choices]
            answer = question
        else:
            context = prompt(question)
            pairs = [(context, f"{between}{each}") for each in choices]
        answers = answer if isinstance(answer, list | tuple) else (answer,)
        # A target is the number of a choice or its text.
        numbers = [choices.index(each) if each in choices else each for each in answers]
        if not numbers or not all(
            isinstance(each, int) and 0 <= each < len(choices) for each in numbers
        ):
            raise ValueError(
                f"the right choice is {answer!r}, and there are {len(choices)} choices, 0 first"
            )
        return Question(document, (*pairs,), choices=choices, right=(*numbers,))

    def _before(self, document: Document, rng: random.Random) -> list[Turn]:
        """Return the turns before the question: the description and examples."""
        cfg, parts = self.cfg, [self.prompt_format.system]
        if cfg.description:
            parts.append(str(self._value(cfg.description, document)))
        parts = [part for part in parts if part]
        # lm-evaluation-harness joins system text and description so; prompts must be equal to the
        # letter.
        spaced = len(parts) == 2 and (parts[0][-1].isspace() or parts[1][0].isspace())
        between = "" if spaced else cfg.fewshot_delimiter
        turns = [Turn("system", between.join(parts))] if parts else []
        for example in self._draw(document, rng):
            try:
                turns += self._example(example)
            except Exception as error:
                number = self.examples.index(example)
                raise DataError(f"example {number} of {cfg.examples}: {_message(error)}") from error
        return turns

    def _example(self, example: Document) -> list[Turn]:
        cfg = self.cfg
        question, answer = self._text(example), self._target(example)
        if isinstance(answer, list | tuple):
            answer = answer[0]
        if isinstance(question, int):
            question = self._choices(example)[question]
        elif isinstance(answer, int) and cfg.doc_to_choice is not None:
            answer = self._choices(example)[answer]
        if answer == "":
            return [Turn("user", question)]
        answered = Turn("assistant", f"{answer}", cfg.fewshot_delimiter)
        return [Turn("user", question, cfg.target_delimiter), answered]

    def _draw(self, document: Document, rng: random.Random) -> Sequence[Document]:
        """Draw the examples before a question, never the question itself from its own split."""
        cfg, pool = self.cfg, self.examples
        count = cfg.num_fewshot or 0
        if not count:
            return ()
        # lm-evaluation-harness also draws so where neither fewshot_split nor test_split is named.
        named = (cfg.fewshot_config.split or cfg.fewshot_split) == cfg.test_split
        own = named or cfg.examples == cfg.split
        others = (each for each in pool if not own or each != document)
        if cfg.fewshot_config.sampler == "first_n":
            drawn = [*itertools.islice(others, count)]
        else:
            more = 1 if own else 0  # for the document itself
            drawn = rng.sample(pool, min(count + more, len(pool)))
            drawn = [each for each in drawn if not own or each != document][:count]
            # Equal documents may take more than one place; then the rest is drawn from the others.
            if len(drawn) < count and len(left := [*others]) >= count:
                drawn = rng.sample(left, count)
        if len(drawn) < count:
            raise DataError(
                f"task {self.name}: num_fewshot={count}, and there are {len(drawn)} examples"
            )
        return drawn

    @functools.cached_property
    def _fields(self) -> frozenset[str]:
        return frozenset(self.documents[0])

    def _value(self, name: str, document: Document) -> Any:
        """Return a field of the documents, or a template rendered with them."""
        if name not in self._fields:
            return _render(name, document)
        if document.get(name) is None:
            raise _lacking(name)
        return document[name]

    def _text(self, document: Document) -> str | int:
        """Return the question, or the number of the right one."""
        text = self.cfg.doc_to_text
        if isinstance(text, int):
            return text
        made = self._value(text, document)
        is_number = text not in self._fields and made.isdigit()
        return int(made) if is_number and self.cfg.doc_to_choice is not None else made

    def _target(self, document: Document) -> Any:
        target = self.cfg.doc_to_target
        if not isinstance(target, str):
            return target
        made = self._value(target, document)
        if target in self._fields:
            return made
        if made.isdigit() and self.cfg.doc_to_choice is not None:
            return int(made)
        if made.startswith("[") and made.endswith("]") and len(made) > 1:
            try:
                # Literals alone, never eval: the text comes from a file of others.
                return ast.literal_eval(made)
            except (SyntaxError, ValueError):
                return made
        return made

    def _choices(self, document: Document) -> tuple[str, ...]:
        choices = self.cfg.doc_to_choice
        if isinstance(choices, str):
            named = choices in self._fields
            choices = (self._value if named else _list)(choices, document)
        values = list(choices.values()) if isinstance(choices, dict) else choices
        if not isinstance(values, list | tuple) or not all(isinstance(x, str) for x in values):
            raise ValueError(
                f"doc_to_choice gives {shortened(repr(values), 100)}, no list of texts"
            )
        return (*values,)


def _list(template: str, document: Document) -> Any:
    """Return the list that a template writes."""
    text = _render(template, document)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        what = "is no field" if text == template else f"gives {shortened(text, 100)}, no list"
        raise ValueError(f"doc_to_choice: {shortened(template, 100)} {what}") from None


def _render(template: str, document: Document) -> str:
    # Jinja would write None as text, and the model would be asked about it.
    values = {name: _mark(value, name) for name, value in document.items()}
    return _template(template).render(values)


@functools.lru_cache(maxsize=256)
def _template(text: str) -> jinja2.Template:
    return _TEMPLATES.from_string(text)


def _mark(value: Any, field: str) -> Any:
    """Replace each null in a value by a Null."""
    if isinstance(value, dict):
        return {name: _mark(item, field) for name, item in value.items()}
    if isinstance(value, list):
        return [_mark(item, field) for item in value]
    return Null(field) if value is None else value


def _lacking(field: str) -> DataError:
    return DataError(f"{quoted(field)} is null, or the document lacks it, and it would be asked")


def _message(error: Exception) -> str:
    said = str(error) if isinstance(error, DataError) else getattr(error, "message", None)
    return shortened(said or f"{type(error).__name__}: {error}", 300)
