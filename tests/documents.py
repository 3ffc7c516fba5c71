"""The commands that README.md and docs/*.md show, and a folder in which they can be run."""

import dataclasses
import gzip
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import parity
from gguf_files import write_gguf
from json_lines import lines_of_texts, write_rows
from PIL import Image
from tokenizer_files import of_words

from maxstack import cli
from maxstack.data import vocabulary
from maxstack.schema.data import DataConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.M | re.S)
RUN = (
    "{extends: synthetic, mesh: {data: 1, fsdp: -1}, train: {batch_size: 32}, "
    "checkpoint: {every: 100}}"
)
WORDS = ("alpha", "beta", "gamma", "delta", "learning", "rate", "the", "a", "of", "gradient")


@dataclasses.dataclass(frozen=True)
class Command:
    """One line of a page, its comment left out."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        """Words of a command, split as a shell does."""
        return shlex.split(self.line)


@dataclasses.dataclass(frozen=True)
class Example:
    """A command that a page shows with what it prints."""

    page: str
    line: str
    printed: str


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The fenced blocks of a page in these languages."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield text


def commands() -> list[Command]:
    """Every line of the blocks for a shell, once for each page."""
    found = [
        Command(page.name, shlex.join(words))
        for page in PAGES
        for block in blocks(page, "", "sh", "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if not block.startswith("$ ") and (words := shlex.split(line, comments=True))
    ]
    return [*dict.fromkeys(found)]


def examples() -> list[Example]:
    """Every block that begins with `$ `."""
    return [
        Example(page.name, lines[0].removeprefix("$ "), "\n".join(lines[1:]) + "\n")
        for page in PAGES
        for block in blocks(page, "")
        if (lines := block.splitlines())[0].startswith("$ ")
    ]


def inline(program: str) -> set[tuple[str, str]]:
    """(page, command) of every `program ...` in a page's prose."""
    return {
        (page.name, found)
        for page in PAGES
        for found in re.findall(
            rf"`({program} [^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))
        )
    }


def write_files(page: Path, folder: Path) -> None:
    """The YAML and Python files of a page, whose first line is their name, with texts in place of
    theirs."""
    for block in blocks(page, "yaml", "python"):
        if name := re.match(r"# ([\w./-]+\.(?:yml|py))\b", block):
            text = block.replace("/my/notes", "notes").replace("/gcs/", "gcs/")
            (folder / name[1]).write_text(text)


def make_folder(folder: Path) -> None:
    """Stand-ins for everything else that the pages name: texts, a model folder, runs of it."""
    text = [" ".join(WORDS[(i + j) % len(WORDS)] for j in range(40 + i % 7)) for i in range(300)]
    rows = lines_of_texts(text)
    (folder / "notes").mkdir()
    for i, line in enumerate(text[:100]):
        (folder / "notes" / f"{i}.md").write_text(line)
    (folder / "more").mkdir()
    (folder / "more" / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    for name in ("texts", "mine", "held-out"):
        (folder / f"{name}.jsonl").write_text(
            rows if name == "mine" else rows[:2000].rpartition("\n")[0] + "\n"
        )
    (folder / "prompts.jsonl").write_text('{"id": "a", "prompt": "alpha"}\n{"tokens": [3, 4]}\n')
    animals = {"question": "What has feathers?", "choices": ["a hen", "a cat"], "right": 0}
    write_rows(folder / "animals.jsonl", (animals | {"question": line[:30]} for line in text[:9]))
    asked = ({"prompt": f"{line[:40]}?", "limit": 9} for line in text[:100])
    write_rows(folder / "questions.jsonl", asked)
    for name in ("text", "held-out"):
        (folder / "gcs" / name).mkdir(parents=True)
        (folder / "gcs" / name / "a.jsonl").write_text(rows)
    for i in range(30):
        path = folder / "photos" / f"{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (80 * (i % 3), i, 0)).save(path)
    shutil.copytree(parity.GOLDENS / "vit", folder / "vit")
    (folder / "vit" / "vision.npz").unlink()
    shutil.copytree(parity.GOLDENS / "dit", folder / "dit" / "transformer")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    model = shutil.copytree(parity.GOLDENS / "qwen3", folder / "Qwen3-0.6B")
    for name in ("golden.npz", "greedy.npz"):
        (model / name).unlink()
    write_tokenizer(model)
    chat = {"tokenizer.chat_template": "12{{ messages[0].content }}"}
    write_gguf(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", parity.GOLDENS / "qwen3", vocab=chat)
    shutil.copytree(parity.GOLDENS / "adapters" / "dora-qwen3", folder / "adapter")
    (folder / "adapter" / "golden.npz").unlink()
    for run in ("mine", "quickstart", "tuned"):
        assert cli.main(["import", str(model), "--out", str(folder / "runs" / run)]) == 0
        learn(folder / "notes", folder / "runs" / run / "tokenizer.model")
    (folder / "RUN.yml").write_text(RUN)
    shutil.copytree(model, folder / "Llama-3.1-70B")


def learn(notes: Path, out: Path) -> None:
    """The tokenizer that a run of the quickstart on these notes has in its folder."""
    source = {"kind": "text", "files": [f"{notes}/*.md"]}
    data = DataConfig.model_validate({"sources": [source]})
    vocabulary.train_vocabulary(data, str(out), vocab=2040, most=True)


def write_tokenizer(model: Path) -> None:
    """A tokenizer.json of 128 words."""
    words = ["<unk>", "</s>", "<|end_of_text|>", *WORDS]
    words += [f"w{i}" for i in range(128 - len(words))]
    of_words(words).save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
