"""Evaluation tasks: the supported part of the task files of lm-evaluation-harness."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from maxstack.config import (
    Fault,
    Items,
    NonNegativeInt,
    PositiveInt,
    Regex,
    Section,
)
from maxstack.config.own_kinds import is_own
from maxstack.schema.sampling import Temperature, TopK, TopP

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
"""Metrics of each kind of request, and their aggregation."""
USUAL = {"multiple_choice": ("acc", "acc_norm")}
"""Default metrics of a task; of the other kinds, all."""
GENERATED = "maxstack"
"""dataset_path of documents that maxstack generates."""


class MetricConfig(Section):
    """A metric of a task."""

    metric: str
    """acc: the choice with the highest log-probability is correct, or for loglikelihood, greedy
    decoding gives the target; the same with log-probabilities divided by the choice's length:
    acc_norm in characters, acc_bytes in bytes, acc_tokens in tokens; exact_match; perplexity,
    word_perplexity, byte_perplexity, bits_per_byte; for generate_until also module:function, which
    maps (answer, right answers) to a number (docs/EXTENDING.md)."""
    aggregation: str | None = None
    """How values are aggregated over documents; null: the metric's own aggregation."""
    higher_is_better: bool | None = None
    """Accepted and ignored: each metric has a direction."""
    ignore_case: bool = False
    """For exact_match: ignore case."""
    ignore_punctuation: bool = False
    """For exact_match: ignore ASCII punctuation."""
    ignore_numbers: bool = False
    """For exact_match: ignore digits."""
    regexes_to_ignore: Items[Regex] = ()
    """For exact_match: ignore matches of these regular expressions."""


class FilterStep(Section):
    """A transformation of the model's answer."""

    function: Literal["regex", "remove_whitespace", "lowercase", "uppercase", "take_first"]
    """regex: extract a group of the match; remove_whitespace: strip both ends."""
    regex_pattern: Regex = r"#### (\-?[0-9\.\,]+)"
    """For regex: the first group is the answer, or the whole match where there is none."""
    group_select: int = 0
    """For regex: index of the match, -1 for the last."""
    fallback: str = "[invalid]"
    """For regex: the answer where nothing matches."""


class FilterConfig(Section):
    """Transformations of the model's answer before metrics see it."""

    name: str
    """Name of the filter: its metrics are called METRIC,NAME, or just METRIC if the name is
    none."""
    filter: Items[FilterStep]


class GenerationConfig(Section):
    """How answers are generated."""

    until: str | Items[str] | None = None
    """Stop strings; null: fewshot_delimiter."""
    max_gen_toks: PositiveInt = 256
    """Maximum number of tokens of an answer."""
    do_sample: bool = False
    """Sample; false: greedy decoding, whatever temperature, top_k and top_p say."""
    temperature: Temperature = 1.0
    """Sampling temperature."""
    top_k: TopK = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    top_p: TopP = 1.0
    """Sample from the fewest likeliest tokens that reach this probability."""


class FewshotConfig(Section):
    """The few-shot examples before a question."""

    sampler: Literal["default", "first_n"] = "default"
    """default: random examples; first_n: the first ones."""
    split: str | None = None
    """The same as fewshot_split."""
    samples: Items[dict[str, Any]] | None = None
    """The examples themselves."""


class TaskConfig(Section):
    """A task: documents, the requests made from them, and metrics of the answers."""

    PRESETS = {"": ("tasks",)}

    task: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the task."""
    task_alias: str | None = None
    """Name to show in tables; null: `task`."""
    tag: str | Items[str] | None = None
    """Labels; ignored."""
    dataset_path: str = "json"
    """json: files in dataset_kwargs.data_files; maxstack: documents that dataset_name names,
    generated from the standard library's files that quickstart.yml holds out; any other: a data set
    for Hugging Face's datasets, a folder's path or a name of the hub."""
    dataset_name: str | None = None
    """For maxstack: letters, keywords, brackets, indentation or next_word. For a data set: its
    configuration."""
    dataset_kwargs: dict[str, Any] | None = None
    """For json: data_files, one path, several, or a mapping of splits to them; JSON lines or a
    list, relative to the working directory or the task's file. For maxstack: count and seed. For a
    data set: further arguments of datasets.load_dataset."""
    training_split: str | None = None
    """Split for few-shot examples where there is no fewshot_split; else validation_split, else
    test_split, without the question itself."""
    validation_split: str | None = None
    """Split of the questions where there is no test_split."""
    test_split: str | None = None
    """Split of the questions."""
    fewshot_split: str | None = None
    """Split of the few-shot examples."""
    output_type: OutputType = "generate_until"
    """Kind of request."""
    doc_to_text: str | int
    """The question: a field of a document, or a Jinja template of its fields. A number, in a task
    with choices: doc_to_choice are questions, doc_to_target is the common continuation, and this is
    the index of the correct choice."""
    doc_to_target: str | int | Items[str | int]
    """The answer: a field, a template, or the index of the correct choice."""
    doc_to_choice: str | Items[str] | dict[str, str] | None = None
    """The choices: a field, a template of a list, or the choices themselves."""
    description: str = ""
    """Template of the text that begins every request."""
    target_delimiter: str = " "
    """Text between question and answer."""
    fewshot_delimiter: str = "\n\n"
    """Text after each example."""
    num_fewshot: NonNegativeInt | None = None
    """Number of few-shot examples; null: none."""
    fewshot_config: FewshotConfig = FewshotConfig()
    metric_list: Items[MetricConfig] = ()
    """Metrics; empty: the usual ones of the output_type."""
    generation_kwargs: GenerationConfig = GenerationConfig()
    filter_list: Items[FilterConfig] = ()
    """Filters of answers, each with metrics of its own; empty: unfiltered answers."""
    repeats: Literal[1] = 1
    """Answers per question."""
    should_decontaminate: bool = False
    """Accepted and ignored: `maxstack data prepare` decontaminates."""
    doc_to_decontamination_query: str | None = None
    """Accepted and ignored, as should_decontaminate is."""
    metadata: dict[str, Any] = {}
    """version and other information. `baseline` is the chance score, which the centered score
    needs; default: that of a random choice, else 0."""

    def own_faults(self) -> Iterator[Fault]:
        known = METRICS[self.output_type]
        for i, each in enumerate(self.metric_list):
            where = f"metric_list.{i}"
            if is_own(each.metric) and self.output_type == "generate_until":
                continue
            if each.metric not in known:
                yield (
                    f"{where}.metric",
                    f"{each.metric} is not a metric of output_type={self.output_type}; there are "
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
        """The split of the questions."""
        return self.test_split or self.validation_split or ""

    @property
    def examples(self) -> str:
        """The split of the examples, or the word samples where they are given."""
        split = self.fewshot_config.split or self.fewshot_split
        if split is None and self.fewshot_config.samples is not None:
            return "samples"
        return split or self.training_split or self.validation_split or self.split

    @property
    def until(self) -> tuple[str, ...]:
        """Stop strings of an answer."""
        given = self.generation_kwargs.until
        if given is None:
            return (self.fewshot_delimiter,)
        return (given,) if isinstance(given, str) else given

    @property
    def metrics(self) -> tuple[MetricConfig, ...]:
        """Metrics, by default the usual ones."""
        usual = USUAL.get(self.output_type, METRICS[self.output_type])
        return self.metric_list or tuple(MetricConfig(metric=name) for name in usual)


class AggregateConfig(Section):
    """A metric of a group."""

    metric: str
    """Metric to aggregate; all tasks of the group must have it."""
    filter_list: str | Items[str] | None = None
    """Names of filters whose metrics to use; null: all that its tasks have."""
    aggregation: Literal["mean"] = "mean"
    weight_by_size: bool = True
    """Weight each task by its number of documents; false: equally."""


class GroupConfig(Section):
    """Several tasks under one name."""

    PRESETS = {"": ("tasks",)}

    group: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the group."""
    group_alias: str | None = None
    """Name to show in tables; null: `group`."""
    task: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=1, strict=False)]
    """Names of tasks, groups or tags, or their files, also relative to this file's folder; or
    mappings, either with a name as `task` and keys to override, or of a whole group."""
    aggregate_metric_list: Items[AggregateConfig] = ()
    """Metrics of the group: means over its tasks."""
    metadata: dict[str, Any] = {}
    """version and other information; ignored."""

    @property
    def name(self) -> str:
        """The name of the group."""
        return self.group

    @property
    def members(self) -> tuple[str, ...]:
        """Names of its tasks, of a resolved group."""
        return tuple(map(str, self.task))


OTHERWISE = "`maxstack eval MODEL --lm-eval --tasks ...` runs any task of lm-evaluation-harness"
