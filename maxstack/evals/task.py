"""A task of evaluation: its documents as requests to a model. What a task's file means is what
lm-evaluation-harness makes of it."""

import ast
import dataclasses
import functools
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxstack.errors import DataError, shortened
from maxstack.schema.tasks import TaskConfig

Document = Mapping[str, Any]
EXAMPLES_SEED = 1234
"""Seed of the examples before questions, lm-evaluation-harness's."""
_TEMPLATES = ImmutableSandboxedEnvironment(
    undefined=jinja2.StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["regex_replace"] = lambda text, pattern, by, count=0: re.sub(
    pattern, by, text, count=count
)


@dataclasses.dataclass(frozen=True)
class Question:
    """A document as requests."""

    document: Document
    pairs: tuple[tuple[str, str], ...] = ()
    """Contexts and what may follow each, to be scored."""
    text: str = ""
    """The text to be scored as a whole, or gone on from."""
    choices: tuple[str, ...] = ()
    right: tuple[Any, ...] = ()
    """Numbers of the right choices, or right answers."""


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The model's view of a continuation."""

    logprob: float
    """Its log-probability, in nats."""
    greedy: bool
    """True where each of its tokens is the likeliest."""
    tokens: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A task with its documents."""

    cfg: TaskConfig
    documents: Sequence[Document]
    examples: Sequence[Document]
    files: Mapping[str, list[str]]
    """By split, the files that its documents were read from."""

    @property
    def name(self) -> str:
        return self.cfg.task

    @functools.cached_property
    def questions(self) -> list[Question]:
        """All of them, in the order of the documents. DataError for a document that does not fit
        the task."""
        rng, made = random.Random(EXAMPLES_SEED), []
        for number, document in enumerate(self.documents):
            try:
                made.append(self._question(document, self._shots(document, rng)))
            except Exception as error:  # a template may do anything
                what = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
                raise DataError(
                    f"task {self.name}, document {number}: {shortened(str(what), 300)}; its fields "
                    f"are {', '.join(document)}"
                ) from error
        return made

    def _question(self, document: Document, shots: str) -> Question:
        cfg = self.cfg
        question, answer = self._text(document), self._target(document)
        choices = self._choices(document) if cfg.doc_to_choice is not None else ()
        if cfg.output_type == "loglikelihood_rolling":
            return Question(document, text=str(answer))
        if cfg.output_type == "generate_until":
            answers = answer if isinstance(answer, list | tuple) else (answer,)
            right = [choices[each] if choices else str(each) for each in answers]
            return Question(document, text=shots + str(question), right=(*right,))
        if cfg.output_type == "loglikelihood":
            return Question(document, pairs=((shots + str(question), str(answer)),))
        if isinstance(question, int):  # the choices are questions, which all go on alike
            pairs = [(shots + each, f"{cfg.target_delimiter}{answer}") for each in choices]
            answer = question
        else:
            pairs = [(shots + question, f"{cfg.target_delimiter}{each}") for each in choices]
        answers = answer if isinstance(answer, list | tuple) else (answer,)
        numbers = [choices.index(each) if each in choices else each for each in answers]
        if not numbers or not all(
            isinstance(each, int) and 0 <= each < len(choices) for each in numbers
        ):
            raise ValueError(
                f"the right choice is {answer!r}, and there are {len(choices)} choices, 0 first"
            )
        return Question(document, (*pairs,), choices=choices, right=(*numbers,))

    def _shots(self, document: Document, rng: random.Random) -> str:
        """What comes before the question: the description and examples."""
        cfg, text = self.cfg, ""
        if cfg.description:
            text = _field(cfg.description, document)
        for example in self._drawn(document, rng):
            question, answer = self._text(example), self._target(example)
            if isinstance(answer, list | tuple):
                answer = answer[0]
            if isinstance(question, int):
                question = self._choices(example)[question]
            elif isinstance(answer, int) and cfg.doc_to_choice is not None:
                answer = self._choices(example)[answer]
            text += question
            if answer != "":
                text += f"{cfg.target_delimiter}{answer}{cfg.fewshot_delimiter}"
        return text

    def _drawn(self, document: Document, rng: random.Random) -> Sequence[Document]:
        """The examples before a question, itself never among them where they are of its split."""
        cfg, count, pool = self.cfg, self.cfg.num_fewshot or 0, list(self.examples)
        if not count:
            return ()
        own = (cfg.fewshot_config.split or cfg.fewshot_split) == cfg.test_split
        others = [each for each in pool if each != document] if own else pool
        if count > len(others):
            raise DataError(
                f"task {self.name}: num_fewshot={count}, and there are {len(others)} examples"
            )
        if cfg.fewshot_config.sampler == "first_n":
            return others[:count]
        if not own:
            return rng.sample(pool, count)
        drawn = rng.sample(pool, min(count + 1, len(pool)))
        drawn = [each for each in drawn if each != document][:count]
        return drawn if len(drawn) == count else rng.sample(others, count)

    def _text(self, document: Document) -> str | int:
        """The question, or the number of the right one."""
        text = self.cfg.doc_to_text
        if isinstance(text, int) or text in document:
            return text if isinstance(text, int) else document[text]
        made = _rendered(text, document)
        return int(made) if made.isdigit() and self.cfg.doc_to_choice is not None else made

    def _target(self, document: Document) -> Any:
        target = self.cfg.doc_to_target
        if not isinstance(target, str):
            return target
        if target in document:
            return document[target]
        made = _rendered(target, document)
        if made.isdigit() and self.cfg.doc_to_choice is not None:
            return int(made)
        if made.startswith("[") and made.endswith("]") and len(made) > 1:
            try:
                return ast.literal_eval(made)
            except (SyntaxError, ValueError):
                return made
        return made

    def _choices(self, document: Document) -> tuple[str, ...]:
        choices = self.cfg.doc_to_choice
        if isinstance(choices, str):
            choices = document[choices] if choices in document else _listed(choices, document)
        values = list(choices.values()) if isinstance(choices, dict) else choices
        if not isinstance(values, list | tuple) or not all(isinstance(x, str) for x in values):
            raise ValueError(
                f"doc_to_choice gives {shortened(repr(values), 100)}, no list of texts"
            )
        return (*values,)


def _field(name: str, document: Document) -> str:
    return str(document[name]) if name in document else _rendered(name, document)


def _listed(template: str, document: Document) -> Any:
    """The list that a template writes."""
    text = _rendered(template, document)
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        what = "is no field" if text == template else f"gives {shortened(text, 100)}, no list"
        raise ValueError(f"doc_to_choice: {shortened(template, 100)} {what}") from None


def _rendered(template: str, document: Document) -> str:
    return _TEMPLATES.from_string(template).render(**document)
