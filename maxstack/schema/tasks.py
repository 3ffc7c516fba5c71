"""Tasks of evaluation: the part of lm-evaluation-harness's task files that is read here, apart from
the runs that are evaluated by them."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from maxstack.config import (
    Fault,
    Items,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Regex,
    Section,
)

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"]
METRICS: dict[str, dict[str, str]] = {
    "multiple_choice": {
        "acc": "mean",
        "acc_norm": "mean",
        "acc_bytes": "mean",
        "acc_tokens": "mean",
        "exact_match": "mean",
    },
    "loglikelihood": {"acc": "mean", "perplexity": "perplexity"},
    "loglikelihood_rolling": {
        "word_perplexity": "weighted_perplexity",
        "byte_perplexity": "weighted_perplexity",
        "bits_per_byte": "bits_per_byte",
    },
    "generate_until": {"exact_match": "mean"},
}
"""Metrics of each kind of request, and how their values are put together."""
USUAL = {"multiple_choice": ("acc", "acc_norm")}
"""Metrics of a task that names none; of the other kinds, all."""
GENERATED = "maxstack"
"""The dataset_path of documents that maxstack makes."""


class MetricConfig(Section):
    """A metric of a task."""

    metric: str
    """acc: the choice with the highest log-probability is right, or of loglikelihood, the target is
    what the model would write; acc_norm: by characters of the choice, acc_bytes: by its bytes,
    acc_tokens: by its tokens; exact_match; perplexity, word_perplexity, byte_perplexity,
    bits_per_byte."""
    aggregation: str | None = None
    """How values are put together; null: as the metric always is."""
    higher_is_better: bool | None = None
    """Taken, and not used: each metric has a direction."""
    ignore_case: bool = False
    """Of exact_match: compare in lower case."""
    ignore_punctuation: bool = False
    """Of exact_match: compare without ASCII punctuation."""
    ignore_numbers: bool = False
    """Of exact_match: compare without digits."""
    regexes_to_ignore: Items[Regex] = ()
    """Of exact_match: compare without what these match."""


class FilterStep(Section):
    """A change of the model's answer."""

    function: Literal["regex", "remove_whitespace", "lowercase", "uppercase", "take_first"]
    """regex: a group of what matches; remove_whitespace: at both ends."""
    regex_pattern: Regex = r"#### (\-?[0-9\.\,]+)"
    """Of regex: its first group is the answer, or all of it where it has none."""
    group_select: int = 0
    """Of regex: the number of the match, -1 for the last."""
    fallback: str = "[invalid]"
    """Of regex: the answer where nothing matches."""


class FilterConfig(Section):
    """Changes of the model's answer, one after the other, before metrics see it."""

    name: str
    """Metrics are called METRIC,NAME, or METRIC where it is none."""
    filter: Items[FilterStep]


class GenerationConfig(Section):
    """How answers are generated."""

    until: str | Items[str] | None = None
    """Strings that end an answer; null: fewshot_delimiter."""
    max_gen_toks: PositiveInt = 256
    """Tokens of an answer at most."""
    do_sample: bool = False
    """Draw tokens; false: the likeliest."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits, where tokens are drawn."""
    top_k: NonNegativeInt = 0
    """Only so many of the likeliest tokens; 0: all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Only the likeliest tokens that together have this probability."""


class FewshotConfig(Section):
    """The examples before a question."""

    sampler: Literal["default", "first_n"] = "default"
    """default: drawn from the examples; first_n: the first of them."""
    split: str | None = None
    """The same as fewshot_split."""
    samples: Items[dict[str, Any]] | None = None
    """The examples themselves."""


class TaskConfig(Section):
    """One task: documents, the requests made of them and metrics of the answers."""

    PRESETS = {"": ("tasks",)}

    task: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its name."""
    task_alias: str | None = None
    """The name that tables show; null: `task`."""
    tag: str | Items[str] | None = None
    """Labels, which nothing is done with."""
    dataset_path: str = "json"
    """json: files of dataset_kwargs.data_files; maxstack: documents that dataset_name names, made
    of the standard library's files that quickstart.yml holds out; any other: a data set as Hugging
    Face's datasets loads it, a folder's path or a name of the hub."""
    dataset_name: str | None = None
    """Of maxstack: letters, keywords, brackets, indentation or next_word. Of a data set: its
    configuration."""
    dataset_kwargs: dict[str, Any] | None = None
    """Of json: data_files, a path, several, or a mapping of splits to them; JSON lines or a list,
    found from the current folder or beside the task's file. Of maxstack: count and seed. Of a data
    set: further arguments of datasets.load_dataset."""
    training_split: str | None = None
    """Examples are drawn from it, where there is no fewshot_split; else from validation_split, else
    from test_split, where the question itself is never among them."""
    validation_split: str | None = None
    """Questions, where there is no test_split."""
    test_split: str | None = None
    """Questions."""
    fewshot_split: str | None = None
    """Examples before a question are drawn from it."""
    output_type: OutputType = "generate_until"
    """What is asked of the model."""
    doc_to_text: str | int
    """The question: a field of a document, or a Jinja template of its fields. A number, of a task
    with choices: these are questions, doc_to_target is how each goes on, and this is the right
    one's."""
    doc_to_target: str | int | Items[str | int]
    """The answer: a field, a template, or the number of the right choice."""
    doc_to_choice: str | Items[str] | dict[str, str] | None = None
    """The choices: a field, or a template of a list, or these."""
    description: str = ""
    """The beginning of every request: a template."""
    target_delimiter: str = " "
    """Between question and answer."""
    fewshot_delimiter: str = "\n\n"
    """After each example."""
    num_fewshot: NonNegativeInt | None = None
    """Examples before a question; null: none."""
    fewshot_config: FewshotConfig = FewshotConfig()
    metric_list: Items[MetricConfig] = ()
    """Metrics; none: the usual ones of the output_type."""
    generation_kwargs: GenerationConfig = GenerationConfig()
    filter_list: Items[FilterConfig] = ()
    """Changes of answers, each of which gives metrics of its own; none: answers as they are."""
    repeats: Literal[1] = 1
    """Answers to each question."""
    should_decontaminate: bool = False
    """Taken, and not used: `maxstack data prepare` decontaminates."""
    doc_to_decontamination_query: str | None = None
    """As should_decontaminate."""
    metadata: dict[str, Any] = {}
    """version and other facts; `baseline`: the score that chance has, for the centred one; default:
    that of drawing among the choices, else 0."""

    def own_faults(self) -> Iterator[Fault]:
        known = METRICS[self.output_type]
        for i, each in enumerate(self.metric_list):
            where = f"metric_list.{i}"
            if each.metric not in known:
                yield (
                    f"{where}.metric",
                    f"{each.metric} is no metric of output_type={self.output_type}; there are "
                    f"{', '.join(known)}",
                )
            elif each.aggregation not in (None, known[each.metric]):
                yield (
                    f"{where}.aggregation",
                    f"{each.metric} is put together by {known[each.metric]}; leave it out",
                )
        if self.output_type == "multiple_choice" and self.doc_to_choice is None:
            yield "doc_to_choice", "a task of multiple choice needs choices"
        if not (self.test_split or self.validation_split):
            yield "test_split", "no questions; name the split that holds them, or validation_split"
        baseline = self.metadata.get("baseline", 0.0)
        if not isinstance(baseline, int | float) or not 0 <= baseline < 1:
            yield "metadata.baseline", "must be a number from 0 to less than 1"

    @property
    def split(self) -> str:
        """The split with the questions."""
        return self.test_split or self.validation_split or ""

    @property
    def examples(self) -> str:
        """The split with examples, or the word samples where they are given."""
        split = self.fewshot_config.split or self.fewshot_split
        if split is None and self.fewshot_config.samples is not None:
            return "samples"
        return split or self.training_split or self.validation_split or self.split

    @property
    def until(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        given = self.generation_kwargs.until
        if given is None:
            return (self.fewshot_delimiter,)
        return (given,) if isinstance(given, str) else given

    @property
    def metrics(self) -> tuple[MetricConfig, ...]:
        """Metrics, the usual ones where the file names none."""
        usual = USUAL.get(self.output_type, METRICS[self.output_type])
        return self.metric_list or tuple(MetricConfig(metric=name) for name in usual)


class AggregateConfig(Section):
    """A metric of a group."""

    metric: str
    """A metric that all its tasks have."""
    filter_list: str | Items[str] | None = None
    """Names of filters whose metrics are meant; null: all that its tasks have."""
    aggregation: Literal["mean"] = "mean"
    weight_by_size: bool = True
    """Each task counts by its number of documents; false: all alike."""


class GroupConfig(Section):
    """Several tasks under one name."""

    PRESETS = {"": ("tasks",)}

    group: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Its name."""
    group_alias: str | None = None
    """The name that tables show; null: `group`."""
    task: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1, strict=False)]
    """Names of tasks, groups or tags, or their files, found from this file's folder too; or
    mappings of a name as `task` and keys of it that are others here, or of a whole group."""
    aggregate_metric_list: Items[AggregateConfig] = ()
    """Metrics of the group: means over its tasks."""
    metadata: dict[str, Any] = {}
    """version and other facts, which nothing is done with."""

    @property
    def name(self) -> str:
        """Its name, as a task has one."""
        return self.group

    @property
    def members(self) -> tuple[str, ...]:
        """Names of its tasks, of a group that was opened."""
        return tuple(map(str, self.task))


OTHERWISE = "`maxstack eval MODEL --lm-eval --tasks ...` runs any task of lm-evaluation-harness"
