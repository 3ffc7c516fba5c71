"""Pictures: sources, what is made of them, what is damaged."""

import io
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from source_files import opened, write_array_records

from maxstack import cli, train
from maxstack.data.feed import Feed
from maxstack.data.images import decode_image as decoded
from maxstack.data.sources import open_sources
from maxstack.errors import DataError
from maxstack.schema.data import DataConfig
from maxstack.schema.objective import RowField

SIDE, NUMBER = 8, 12


def picture(number, size=(20, 12)):
    """A picture that tells its number, as the bytes of a PNG file."""
    pixels = np.full((size[1], size[0], 3), 10 * number, np.uint8)
    pixels[: size[1] // 2, :, 1] = 255
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def folders():
    for i in range(NUMBER):
        path = Path("train") / ("cat", "dog", "eel")[i % 3] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(i))
    return {"kind": "images", "files": ["train/*/*.png"]}


def scans(count):
    """A JPEG file that goes over its picture so many times."""
    Image.new("RGB", (64, 64)).save(file := io.BytesIO(), "JPEG", progressive=True)
    whole = file.getvalue()
    last = whole.rindex(b"\xff\xda")
    more = count - whole.count(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * more + whole[-2:]


def tar(members=None):
    if members is None:
        pictures = {f"part/{i:02}.png": picture(i) for i in range(NUMBER)}
        members = pictures | {f"part/{i:02}.cls": f"{i % 3}\n".encode() for i in range(NUMBER)}
    with tarfile.open("a.tar", "w") as out:
        for name, content in sorted(members.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return {"kind": "tar", "files": ["a.tar"]}


def parquet(rows=None):
    if rows is None:
        pictures = ({"bytes": picture(i), "path": None} for i in range(NUMBER))
        rows = [{"image": image, "label": i % 3} for i, image in enumerate(pictures)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet", row_group_size=5)
    return {"kind": "parquet", "files": ["a.parquet"], "record": {"kind": "image"}}


def part(number, content):
    """A field of bytes in protobuf's wire format."""
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    return bytes([number << 3 | 2]) + length + content


def example(**features):
    """A tf.train.Example, written by hand."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = part(1, part(1, value))
        elif isinstance(value, int):
            feature = part(3, part(1, bytes([value])))
        else:
            feature = part(2, part(1, np.asarray(value, "<f4").tobytes()))
        entries += part(1, part(1, name.encode()) + part(2, feature))
    return part(1, entries)


def array_record(records=None, kind="image"):
    if records is None:
        records = [example(image=picture(i), label=i % 3) for i in range(NUMBER)]
    write_array_records("a.array_record", records)
    return {"kind": "array_record", "files": ["a.array_record"], "record": {"kind": kind}}


SOURCES = {"images": folders, "tar": tar, "parquet": parquet, "array_record": array_record}


@pytest.fixture
def feed():
    """Makes feeds and closes them."""
    made = []

    def make(source, lanes=range(4), evaluation=False, classes=3, dtype="uint8", **changes):
        data = {"sources": [source], "seq_len": 4, "packing": "none"}
        data |= {"image": {"crop": "none", "flip": False}} | changes
        fields = {
            "image": RowField("batch", dtype, (SIDE, SIDE, 3)),
            "label": RowField("batch", "int32", below=classes),
            "real": RowField("batch", "float32"),
        }
        cfg = DataConfig.model_validate(data)
        made.append(Feed(cfg, [*lanes], 4, evaluation=evaluation, fields=fields))
        return made[-1]

    yield make
    for each in made:
        each.close()


def three(feed):
    """Batches of all pictures."""
    return [next(feed) for _ in range(NUMBER // 4)]


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_gives_pictures_and_their_classes(kind):
    documents = opened(**SOURCES[kind]())
    assert len(documents) == NUMBER
    for i in range(NUMBER):
        content, label = documents[i]
        number = np.asarray(Image.open(io.BytesIO(content)))[0, 0, 0] // 10
        by_row = kind in ("parquet", "array_record")
        assert label == number % 3 and str(i if by_row else number) in documents.where(i)


@pytest.mark.slow
def test_changes_depend_on_neither_lanes_nor_workers_nor_a_restart(feed):
    image = {"crop": "inception", "flip": True, "randaugment": {"layers": 2}, "shift": 1}

    def batches(lanes=range(4), count=6, restore=None, **more):
        made = feed(folders(), lanes, image=image, **more)
        if restore is not None:
            made.restore(restore)
        found = [next(made)["image"].copy() for _ in range(count)]
        return np.stack(found), made.state()

    whole, _ = batches()
    assert len({image.tobytes() for batch in whole for image in batch}) > NUMBER  # epochs differ
    np.testing.assert_array_equal(batches([1, 3])[0], whole[:, [1, 3]])
    np.testing.assert_array_equal(batches(workers=2)[0], whole)
    _, state = batches(count=2)
    np.testing.assert_array_equal(batches(count=4, restore=state)[0], whole[2:])


def test_evaluation_reads_every_picture_once_and_pads(feed):
    source = folders() | {"holdout": 0.5}
    held = NUMBER - len(opened(**source))
    image = {"crop": "inception", "randaugment": {}}
    batches = three(feed(source, evaluation=True, image=image))
    real = np.concatenate([batch["real"] for batch in batches])
    assert real.sum() == held and 0 < held < NUMBER
    images = np.concatenate([batch["image"] for batch in batches])
    assert not images[real == 0].any() and images[real > 0].any(axis=(1, 2, 3)).sum() >= held - 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "04.png: not a readable picture"),
        (lambda path: path.write_bytes(scans(101)), "more than 100 scans"),
    ],
)
def test_a_broken_picture_is_named_and_passed_over_where_it_may(feed, damage, message):
    source = folders()
    (path,) = Path("train").glob("*/04.png")
    damage(path)
    with pytest.raises(DataError, match=message):
        three(feed(source))
    made = feed(source, quarantine=1)
    images = np.concatenate([batch["image"] for batch in three(made)])
    assert 4 not in images[:, 0, 0, 0] // 10
    assert any(message in line for line in made.skipped())


def numbers(shape=(SIDE, SIDE, 3)):
    """Latents of every document."""
    return np.random.default_rng(0).normal(size=(NUMBER, *shape)).astype(np.float16)


def npz(shape=(SIDE, SIDE, 3)):
    made = numbers(shape)
    np.savez("a.npz", latents=made[:5], label=np.arange(5) % 3)
    np.savez("b.npz", latents=made[5:].astype(np.float32), label=np.arange(5, NUMBER) % 3)
    return {"kind": "npz", "files": ["*.npz"]}


@pytest.mark.parametrize("form", ["npz", "bytes", "floats"])
def test_latents_are_rows_as_they_are(feed, form):
    if form == "npz":
        source = npz()
    else:
        latents = [x.tobytes() if form == "bytes" else x.ravel() for x in numbers()]
        records = [example(latents=x, label=i % 3) for i, x in enumerate(latents)]
        source = array_record(records, "latents")
    wanted = {row.tobytes(): i % 3 for i, row in enumerate(numbers())}
    rows = {
        row.tobytes(): label
        for batch in three(feed(source, dtype="float16"))
        for row, label in zip(batch["image"], batch["label"], strict=True)
    }
    assert rows == wanted


def test_two_sources_number_their_classes_alike(feed):
    folders()
    named = [{"kind": "images", "files": [f"train/{name}/*.png"]} for name in ("cat", "dog")]
    cfg = {"sources": named, "seq_len": 4, "packing": "none"}
    with pytest.raises(DataError, match="the same number would mean two classes"):
        open_sources(DataConfig.model_validate(cfg))
    told = feed(folders()).describe()
    assert told == ["images-0: 12 documents; 3 classes: 0 cat, 1 dog, 2 eel"]


@pytest.mark.slow
def test_evaluation_data_number_their_classes_as_training_does(capsys):
    folders()
    own = "eval.data={sources: [{kind: images, files: ['train/dog/*.png']}]}"
    words = ["model.image_size=8", "model.channels=3", "model.classes=3", own]
    words += ["data.sources=[{kind: images, files: ['train/*/*.png']}]", "train.steps=1"]
    words += ["train.batch_size=8", "run.output_dir=runs", "run.tensorboard=false"]
    assert cli.run(train.main, ["recipes/vit-digits.yml", *words]) == 2
    assert "the same number would mean two classes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: tar({"lone.png": picture(0)}), "lone: has no .cls beside it"),
        (lambda: array_record([b"no example"]), "record 0: not a tf.train.Example"),
        (
            lambda: parquet([{"image": "a.png", "label": 1}]),
            "a.parquet: record 0: 'image' is a str, not the bytes of a picture",
        ),
        (
            lambda: parquet([{"image": b"", "label": "cat"}]),
            "a.parquet: record 0: 'label' is \"?'cat'\"?, not the number of a class",
        ),
    ],
    ids=["no class", "no example", "no picture", "no number"],
)
def test_a_record_that_is_no_picture_with_a_class_is_named(source, said):
    documents = opened(**source())
    with pytest.raises(DataError, match=said):
        documents[0]


def test_sixteen_bits_keep_their_brightness():
    out = io.BytesIO()
    Image.fromarray(np.array([[0, 0x8000], [0x4000, 0xFFFF]], np.uint16)).save(out, "png")
    found = np.asarray(decoded(out.getvalue(), 1))
    np.testing.assert_array_equal(found, [[0, 128], [64, 255]])


def stored(pixels, kind="png", **settings):
    """The bytes of a file."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **settings)
    return out.getvalue()


@pytest.mark.parametrize(
    ("orientation", "seen"),
    [
        (1, [[0, 50, 100], [150, 200, 250]]),
        (2, [[100, 50, 0], [250, 200, 150]]),
        (6, [[150, 0], [200, 50], [250, 100]]),
    ],
)
def test_a_picture_is_turned_as_its_exif_orientation_says(orientation, seen):
    exif = Image.Exif()
    exif[0x0112] = orientation
    pixels = np.array([[0, 50, 100], [150, 200, 250]], np.uint8)
    for kind in ("png", "tiff"):
        np.testing.assert_array_equal(decoded(stored(pixels, kind, exif=exif), 1), seen)


def test_what_is_transparent_is_white():
    pixels = np.array([[[200, 100, 0, 0], [200, 100, 0, 255], [200, 100, 0, 51]]], np.uint8)
    seen = [[[255] * 3, [200, 100, 0], [244, 224, 204]]]
    np.testing.assert_array_equal(decoded(stored(pixels), 3), seen)
    grey = stored(np.array([[0, 90]], np.uint8), transparency=90)
    np.testing.assert_array_equal(decoded(grey, 1), [[0, 255]])


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_numbers_of_32_bits_are_refused(dtype):
    with pytest.raises(ValueError, match="32-bit pixels, whose range the file does not state"):
        decoded(stored(np.full((4, 4), 3, dtype), "tiff"), 1)


def bomb():
    """A PNG file that says that it has 30,000 x 3,000 pixels: more than Pillow warns of."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 30_000, 3_000, 8, 2, 0, 0, 0)
    made = stored(np.zeros((4, 4, 3), np.uint8))
    crc = struct.pack(">I", zlib.crc32(header))
    return made[:12] + header + crc + made[33:]


BROKEN = {
    "eps": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "larger than Pillow warns of": bomb,
    "larger than Pillow opens": lambda: bomb().replace(
        *(b"IHDR" + struct.pack(">II", 30_000, high) for high in (3_000, 30_000))
    ),
    "avif": lambda: (x := stored(np.zeros((8, 8, 3), np.uint8), "avif"))[: len(x) * 2 // 3],
    "tiff": lambda: stored(np.zeros((8, 8, 3), np.uint8), "tiff")[:60],
    "webp": lambda: stored(np.zeros((64, 64, 3), np.uint8), "webp")[:40],
    "empty": lambda: b"",
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BROKEN)
def test_whatever_pillow_raises_is_a_broken_record_with_its_name(feed, name, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("starts a program"))
    source = folders()
    (path,) = Path("train").glob("*/04.png")
    path = path.rename(path.with_name("04.jpg"))
    path.write_bytes(BROKEN[name]())
    with pytest.raises(DataError, match=r"04\.jpg: not a readable picture: "):
        three(feed(source | {"files": ["train/*/*"]}))


def test_latents_of_another_shape_are_named(feed):
    with pytest.raises(DataError, match=r"a.npz: record .: latents of shape \[4, 4, 3\]"):
        next(feed(npz((4, 4, 3)), dtype="float16"))
    for arrays, message in (
        ({"latents": numbers()}, "must hold latents and label"),
        ({"latents": numbers(), "label": np.arange(3)}, r"must be \[N, S, S, C\] and \[N\]"),
        (
            {"latents": numbers(), "label": np.full(NUMBER, 0.5)},
            "must be numbers and whole numbers",
        ),
        ({"latents": np.array([{}]), "label": np.arange(1)}, "not a readable .npz file"),
    ):
        np.savez("a.npz", **arrays)
        with pytest.raises(DataError, match=message):
            opened("npz", "a.npz")


def test_a_class_that_the_model_does_not_have_is_named(feed):
    with pytest.raises(DataError, match="is of class 2, but model.classes=2 counts from 0"):
        three(feed(folders(), classes=2))


def test_a_tar_that_is_cut_short_is_named():
    source = tar()
    Path("a.tar").write_bytes(Path("a.tar").read_bytes()[:700])
    with pytest.raises(DataError, match="a.tar"):
        opened(**source)[0]


def test_pictures_of_a_run_are_drawn(tmp_path, capsys):
    words = ["data", "show", "recipes/vit-digits.yml", "--rows", "5", "--batches", "2"]
    assert cli.main([*words, "--out", "seen.png"]) == 0
    said = capsys.readouterr().out
    assert "digits-0: 1447 documents" in said and said.count("classes") == 2
    assert Image.open("seen.png").size == (5 * 33 - 1, 2 * 33 - 1)
