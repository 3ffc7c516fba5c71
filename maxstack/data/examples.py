"""Records as examples: the tokens of a conversation, a pair, an answer or a prompt, and which
count.

What a record holds is read by conversations.py into one of two forms. A completion is a text and
its continuation, of which the continuation and EOS count. A conversation is rendered by the chat
template, and what counts are the answers of the assistant up to the token that ends a turn: by the
template's `{% generation %}` markers, or else by rendering the prompt before each answer and the
conversation up to it, both of which must be beginnings of the whole text. A token that would hold
the end of a prompt and the beginning of an answer is split there, as a model that generates has it.

The stages: a raw record (presets.py maps published shapes) -> `Example` (conversations.py) ->
`Segment`s of ids and targets -> `Unit`, which is packed into rows.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maxstack import strict_json
from maxstack.data.chat import ChatTemplate, Span, encode_chat, open_template
from maxstack.data.conversations import (
    Completion,
    Conversation,
    Example,
    exchange_answer,
    prompt_of,
    read_example,
    read_label,
    read_margin,
    read_number,
    read_preference,
    read_prompt,
)
from maxstack.data.documents import Documents
from maxstack.data.omissions import refuse_omissions
from maxstack.data.presets import apply_preset
from maxstack.data.tokenizers import (
    Tokenizer,
    name_errors,
    open_prompt_tokenizer,
    open_tokenizer,
    read_document,
)
from maxstack.errors import DataError, quoted
from maxstack.schema.data import AnswerRecord, ChatRecord, DataConfig, Record

if TYPE_CHECKING:
    from maxstack.schema.objective import RowField as Field

OF_TOKENS = "ends", "teacher_tokens", "teacher_logps"
"""Extras of a token. ends: 1 at the last token of a sequence, which is then among the inputs;
teacher_tokens and teacher_logps [K]: the likeliest tokens under a teacher, and their
log-probabilities."""
OF_SEQUENCES = "label", "margin", "mismatched", "reference"
"""Extras that are the same on a whole sequence. label: 1 or -1, of an answer that is wanted or not;
margin: of a preference; mismatched: 1 on a prompt with another's answer; reference: the
log-probability of an answer under a reference."""
EXTRAS = *OF_TOKENS, *OF_SEQUENCES
"""Arrays that rows of records may have beside tokens, where an objective declares them."""
Raw = Mapping[str, Any]
Another = Callable[[int], Raw]
STRADDLES = (
    "record.joined: a token holds the end of a prompt and the beginning of its answer, at {}; let "
    "the answer begin with the space, or leave record.joined out"
)
_PROMPT = {"prompt", "system", "tools"}
_EXAMPLE = _PROMPT | {"completion", "messages", "conversations"}
READ = {
    "chat": _EXAMPLE | {"top_tokens", "top_logprobs"},
    "labelled": _EXAMPLE | {"label", "ref_logps"},
    "pairs": _PROMPT
    | {"chosen", "rejected", "completions", "scores", "margin"}
    | {"ref_chosen_logps", "ref_rejected_logps"},
}
"""Keys of records that are read, by kind; of kinds that are not here any key may be used."""
TRIES, MORE = 8, 64
"""Other records that are tried for an answer to another prompt: 8, and 64 more if all of these
repeat the prompt."""


class Segment(NamedTuple):
    """Tokens that see each other: a sequence of a packed row."""

    ids: np.ndarray
    """int32 [N]."""
    values: Mapping[str, np.ndarray]
    """Arrays [N, ...] of a row by name, each element of the token that is predicted; records have
    `mask`, texts do not, for whose tokens it is 1."""


class Unit(NamedTuple):
    """Consecutive segments, kept `whole` in one row (records) or split where a row ends (texts)."""

    segments: list[Segment]
    whole: bool
    record: Raw | None = None
    """The record, of a prompt."""

    @property
    def length(self) -> int:
        """Positions that it takes in a row: one fewer than its ids for each segment."""
        return sum(len(segment.ids) - 1 for segment in self.segments)

    def cut(self, most: int) -> "Unit | None":
        """Return the beginnings of the segments, at most so many tokens of a row; of two segments
        each gets half and what the other leaves. None if nothing that counts is left of one."""
        sizes = [len(segment.ids) - 1 for segment in self.segments]
        share = most // len(sizes)
        spare = sum(max(0, share - size) for size in sizes)
        end = share + spare + 1
        parts = []
        for ids, values in self.segments:
            kept = {name: each[:end] for name, each in values.items()}
            parts.append(Segment(ids[:end], kept))
        counted = all(part.values["mask"][1:].any() for part in parts)
        return Unit(parts, self.whole) if counted else None


class UnitMaker:
    """Makes units of the records of one kind, with the arrays in `fields`."""

    def __init__(self, record: Record, cfg: DataConfig, fields: Mapping[str, "Field"]):
        self._cfg = cfg
        self._fields = fields
        self._train = record.train if isinstance(record, ChatRecord) else "assistant"
        self._joined = isinstance(record, AnswerRecord) and record.joined
        self._tokenizer = open_tokenizer(cfg.tokenizer)

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """Return the units of a record; `another` gives some other record of the source for each
        number."""
        raise NotImplementedError

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return open_template(self._cfg)

    def _segments(self, given: Example, **constants: float) -> list[Segment]:
        """Return the segments of an example, with those of OF_SEQUENCES that are declared."""
        if isinstance(given, Completion):
            segments = [self._completion(given)]
        else:
            segments = self._conversation(given, self._train)
        # An objective reads the last token of a sequence, which is an input only if a target
        # follows it.
        if "ends" in self._fields:
            segments = [add_end_token(segment) for segment in segments]
        wanted = constants.keys() & self._fields.keys()
        for i, (ids, arrays) in enumerate(segments):
            added = {name: np.full(len(ids), constants[name], np.float32) for name in wanted}
            segments[i] = Segment(ids, {**arrays, **added})
        return segments

    def _completion(self, given: Completion) -> Segment:
        """Prompt and completion, of which the completion and EOS count."""
        if not self._tokenizer.eos:
            raise DataError(
                "a completion must end in a token at which generation stops, and data.tokenizer "
                "has none; set data.tokenizer.eos"
            )
        # Encoded jointly first, as a text is in pretraining; apart only if a token straddles the
        # border.
        longest, before = self._cfg.longest, given.prompt.encode()
        prompt = self._prompts.encode(before, longest)
        ids = self._tokenizer.encode(before + given.completion.encode(), longest)
        if not np.array_equal(ids[: len(prompt)], prompt):
            # A token of the joined text holds the end of the prompt and the beginning of the
            # completion, as " no" does after "Answer: ".
            if self._joined:
                raise DataError(
                    STRADDLES.format(quoted(given.prompt[-20:] + given.completion[:20]))
                )
            rest = self._completions.encode(given.completion.encode(), longest)
            ids = np.concatenate([prompt, rest])
        mask = (np.arange(len(ids)) >= len(prompt)).astype(np.float32)
        return Segment(ids, {"mask": mask})

    @functools.cached_property
    def _prompts(self) -> Tokenizer:
        return open_prompt_tokenizer(self._cfg.tokenizer)

    @functools.cached_property
    def _completions(self) -> Tokenizer:
        return open_prompt_tokenizer(self._cfg.tokenizer, bos=False, eos=True)

    def _conversation(self, given: Conversation, train: str) -> list[Segment]:
        # With `trained`, earlier answers belong to the prompt, and only what comes after it counts.
        turns = {
            i: given.weights.get(i, 1.0)
            for i, message in enumerate(given.messages)
            if message["role"] == "assistant" and i >= given.trained
        }
        if not turns:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in given.messages))
            raise DataError(
                f"no message of the assistant, so there is nothing to train on; roles are {roles}"
            )
        if train == "all":
            # Weights belong to answers, and "all" has one span for the whole text.
            if {*turns.values()} != {1.0}:
                raise DataError(
                    "a message has a weight, and record.train=all trains on the whole conversation;"
                    " set record.train=assistant, or leave the weight out"
                )
            # A template that leaves out tool calls would train an empty turn; see omissions.py.
            refuse_omissions(self._template, given.messages, given.tools, turns)
            text = self._template.render(given.messages, given.tools, add_generation_prompt=False)
            return [self._tokens(text, {(0, len(text)): 1.0}, check=False)]
        if train == "last":
            last = max(turns)
            turns = {last: turns[last]}
        # An answer of weight 0 has no target, so it need not be found in the text.
        turns = {turn: weight for turn, weight in turns.items() if weight}
        if not turns:
            raise DataError(
                "all messages of the assistant that would count have weight 0, so there is nothing "
                "to train on; leave the record out"
            )
        if train == "each":
            return [
                # Rendered up to each answer: templates may write an earlier turn otherwise once
                # others follow, such as without its reasoning.
                self._spelt(given.messages[: turn + 1], given, {turn: weight})
                for turn, weight in turns.items()
            ]
        return [self._spelt(given.messages, given, turns)]

    def _spelt(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Conversation,
        turns: Mapping[int, float],
    ) -> Segment:
        """Return the tokens of messages, of which these turns count, each with its weight. A turn
        is what the template's markers enclose, or else what follows the prompt before it."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        refuse_omissions(self._template, messages, given.tools, turns)
        if marked := self._template.marked(messages, given.tools):
            text, spans = marked
            # Spans and answers are matched by their order alone.
            if len(spans) != len(answers):
                raise DataError(
                    f"{self._template.where}: {len(spans)} {{% generation %}} blocks for "
                    f"{len(answers)} messages of the assistant; there must be one for each"
                )
            return self._tokens(text, {spans[answers.index(i)]: turns[i] for i in turns})
        text = self._template.render(messages, given.tools, add_generation_prompt=False)
        return self._tokens(
            text, {self._after_prompt(messages, given, i, text): turns[i] for i in turns}
        )

    def _after_prompt(
        self, messages: Sequence[Mapping[str, Any]], given: Conversation, turn: int, text: str
    ) -> Span:
        """Return where a turn stands in the text: after the prompt for it, up to where the
        conversation that ends with it does. DataError if these are no beginnings of the text."""
        # By rendering twice rather than searching for the answer's text, which the template may
        # trim or escape, or which may occur twice.
        prompt = self._template.render(messages[:turn], given.tools)
        whole = self._template.render(
            messages[: turn + 1], given.tools, add_generation_prompt=False
        )
        for part, what in ((prompt, "prompt before"), (whole, "conversation up to")):
            if not text.startswith(part):
                at = next(
                    (i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), 0
                )
                each = ""
                if self._train != "each":
                    each = "set record.train=each, which gives each answer a row of its own, or "
                raise DataError(
                    f"{self._template.where}: the template writes the {what} message {turn} "
                    f"otherwise than in the whole conversation, from {quoted(part[at : at + 30])} "
                    f"on, so it is not known what is trained on; {each}"
                    "mark answers in the template with {% generation %} and {% endgeneration %}"
                )
        return len(prompt), len(whole)

    def _tokens(self, text: str, spans: Mapping[Span, float], check: bool = True) -> Segment:
        """Return the text's tokens, of which those in the spans count up to the token that ends a
        turn, each with its span's weight."""
        ids, tokens = self._encoded(text, [begin for begin, _ in spans])
        mask, written = np.zeros(len(ids), np.float32), text.encode()
        segment = Segment(ids, {"mask": mask})
        for (first, after), weight in spans.items():
            begin, end = len(text[:first].encode()), len(text[:after].encode())
            # Spans are in bytes, as the tokenizer reports tokens; templates give characters.
            inside = np.flatnonzero((tokens[:, 0] >= begin) & (tokens[:, 1] <= end))
            mask[inside] = weight
            if not check:
                continue
            last = len(inside)
            while last and not written[slice(*tokens[inside[last - 1]])].strip():
                last -= 1  # white space after the end of a turn is never generated
            # An answer that does not end in a stop token trains a model that never stops.
            if not last or int(ids[inside[last - 1]]) not in self._tokenizer.special:
                tail = written[begin:end].decode(errors="replace")[-30:]
                raise DataError(
                    f"a turn of the assistant ends in {quoted(tail)}, which is no special token of "
                    f"{self._tokenizer.name}, so the model would not learn to stop; let the chat "
                    "template write the EOS token there"
                )
            mask[inside[last:]] = 0
        return segment

    def _encoded(self, text: str, begins: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of a rendered conversation, and the span of bytes of each. If a token
        holds the end of a prompt and the beginning of an answer, the text is encoded in parts that
        meet there."""
        ids, tokens = encode_chat(self._tokenizer, text)
        cuts = []
        for begin in begins:
            at = len(text[:begin].encode())
            if np.any((tokens[:, 0] < at) & (tokens[:, 1] > at)):
                cuts.append(begin)
        # Encoding the text once keeps merges across all other places; parts are needed only for
        # cuts.
        if not cuts:
            return ids, tokens
        if self._joined:
            raise DataError(STRADDLES.format(quoted(text[max(0, cuts[0] - 20) : cuts[0] + 20])))
        parts = []
        for first, after in itertools.pairwise([0, *cuts, len(text)]):
            part, spans = encode_chat(self._tokenizer, text[first:after])
            parts.append((part, spans + len(text[:first].encode())))
        ids, tokens = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return ids, tokens


class Chats(UnitMaker):
    """A conversation, or a prompt with its completion."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """Return one unit, or with train=each one for each answer."""
        segments = self._segments(read_example(record))
        if "teacher_tokens" in self._fields:
            segments = [_add_teacher(segment, record, self._fields) for segment in segments]
        return [Unit([segment], whole=True) for segment in segments]


class Pairs(UnitMaker):
    """A chosen and a rejected answer to one prompt, one after the other."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """Return one unit of two segments."""
        segments = []
        for name, given in zip(("chosen", "rejected"), read_preference(record), strict=True):
            values = {"margin": read_margin(record)} if "margin" in self._fields else {}
            if "reference" in self._fields:
                values["reference"] = read_number(record, f"ref_{name}_logps")
            segments += self._segments(given, **values)
        return [Unit(segments, whole=True)]


class Labelled(UnitMaker):
    """An answer that is wanted or not, followed by an answer to another prompt if an objective
    declares `mismatched`."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """Return one unit of one segment or two."""
        given, values = read_example(record), {"label": 1.0 if read_label(record) else -1.0}
        if "reference" in self._fields:
            values["reference"] = read_number(record, "ref_logps")
        segments = self._segments(given, **values)
        if "mismatched" in self._fields:
            # Lazy: most records find another prompt at the first try, and each try reads a record.
            others = (read_example(another(attempt)) for attempt in range(TRIES + MORE))
            other = next((one for one in others if prompt_of(one) != prompt_of(given)), None)
            if other is None:
                raise DataError(
                    f"{TRIES + MORE} other records have this prompt too, and objective.loss=kto "
                    "compares with answers to other prompts; add records of others, or set "
                    "objective.loss=apo_zero, which needs none"
                )
            segments += self._segments(exchange_answer(given, other), mismatched=1.0)
        return [Unit(segments, whole=True)]


class Prompts(UnitMaker):
    """A prompt alone; nothing of it counts."""

    def units(self, record: Raw, another: Another) -> list[Unit]:
        """Return one unit of one segment."""
        given = read_prompt(record)
        # Without EOS: the model goes on from here.
        if isinstance(given, Completion):
            ids = self._prompts.encode(given.prompt.encode())
        else:
            refuse_omissions(self._template, given.messages, given.tools, ())
            text = self._template.render(given.messages, given.tools)
            ids, _ = encode_chat(self._tokenizer, text)
        segment = Segment(ids, {"mask": np.zeros(len(ids), np.float32)})
        return [Unit([segment], whole=True, record=record)]


KINDS: dict[str, type[UnitMaker]] = {
    "chat": Chats,
    "pairs": Pairs,
    "labelled": Labelled,
    "prompts": Prompts,
}


def units_of(
    documents: Documents, index: int, cfg: DataConfig, fields: Mapping[str, "Field"]
) -> list[Unit]:
    """Return the units of a record. DataError, naming its file and record, if it cannot be read."""

    def another(attempt: int) -> Raw:
        # Spread over the source, so that neighbours, which often share a prompt, are far.
        tries, number = (TRIES + 1, attempt + 1) if attempt < TRIES else (MORE, attempt - TRIES)
        step = 1 + number * len(documents) // tries
        return _record(documents, (index + step) % len(documents), cfg)

    assert documents.record
    # Templates and tokenizers are opened once a process, not once a record.
    maker = _unit_maker(documents.record, cfg, frozenset(fields.items()))
    with name_errors(documents, index):
        record = _record(documents, index, cfg)
        try:
            return maker.units(record, another)
        except DataError as error:
            raise DataError(f"{documents.where(index)}: {error}") from error


@functools.lru_cache(maxsize=16)
def _unit_maker(
    record: Record, cfg: DataConfig, fields: frozenset[tuple[str, "Field"]]
) -> UnitMaker:
    return KINDS[record.kind](record, cfg, dict(fields))


def _record(documents: Documents, index: int, cfg: DataConfig) -> Mapping[str, Any]:
    document = read_document(documents, index, cfg.longest, cfg.beyond)
    assert isinstance(document, bytes)
    try:
        value = strict_json.parse(document, documents.where(index), strict=False)
    except DataError as error:
        raise DataError(f"{error}; {_remedy(document)}") from error
    if not isinstance(value, dict):
        raise DataError(f"{documents.where(index)}: is no JSON object; {_remedy(document)}")
    assert documents.record
    try:
        return apply_preset(value, documents.record)
    except DataError as error:
        raise DataError(f"{documents.where(index)}: {error}") from error


def _remedy(document: bytes) -> str:
    if document.lstrip()[:1] == b"[":
        return "write a line for each element of the array: jq -c '.[]' FILE > FILE.jsonl"
    return "mend or remove the record"


def _add_teacher(
    segment: Segment, record: Mapping[str, Any], fields: Mapping[str, "Field"]
) -> Segment:
    """Return the segment with the teacher's `top_tokens` and `top_logprobs` of a record, each
    [tokens, K]. DataError if they have another shape."""
    (top,) = fields["teacher_tokens"].size
    values = {**segment.values}
    for name, key in (("teacher_tokens", "top_tokens"), ("teacher_logps", "top_logprobs")):
        shape = len(segment.ids), top
        try:
            # A file may hold more candidates than the objective asks for, the likeliest first.
            stored = np.array(record[key], fields[name].dtype)[:, :top]
        except (KeyError, ValueError, TypeError, IndexError):
            stored = np.zeros(0)
        if stored.shape != shape:
            raise DataError(
                f"{key}: must hold {shape[0]} lists of {top} numbers, one for each token; "
                f"`maxstack score TEACHER --records FILE --top {top} --out FILE` writes them"
            )
        values[name] = stored
    return segment._replace(values=values)


def add_end_token(segment: Segment) -> Segment:
    """Return the segment with a token of no meaning after the last, which is then an input whose
    score can be read. Nothing else counts any longer. Like all values, `ends` is written at the
    token after the one that it is about."""
    # One shared array serves both values: where the sequence ends is all that counts.
    mask = np.zeros(len(segment.ids) + 1, np.float32)
    mask[-1] = 1
    return Segment(np.append(segment.ids, np.int32(0)), {"mask": mask, "ends": mask})
