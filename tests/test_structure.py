"""The house rules that a program can check: imports flow one way, files and functions stay short,
names say something."""

import ast
import graphlib
import runpy
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from maxstack.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path for folder in ("maxstack", "tests", "scripts") for path in (ROOT / folder).rglob("*.py")
)
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in FILES
    if path.is_relative_to(ROOT / "maxstack")
}

# From top to bottom. A module may import what stands below it, and its own package; not its peers
# in the same line. The longest name counts.
LEVELS = (
    ("commands",),
    ("train", "submit", "llm", "library", "convert", "parts"),
    ("elastic", "cli", "faults.supervisor"),
    ("command",),
    ("loop",),
    ("callbacks",),
    ("startup",),
    ("rollouts",),
    ("evals",),
    ("package",),
    ("inference", "checks", "alike"),
    ("starting_weights", "profile"),
    ("compiled_steps",),
    ("meter", "plan"),
    ("run",),
    ("weights.placement", "step"),
    ("state", "load"),
    ("weights.rewrite",),
    ("objectives",),
    ("models", "weights", "optim", "checkpoint", "faults"),
    ("hf",),
    ("data", "rewards"),
    ("report",),
    ("cluster", "layers"),
    ("kernels",),
    ("sharding",),
    ("hardware",),
    ("schema",),
    ("config",),
    ("strict_json",),
    ("limited", "regular_file"),
    ("errors", "package.loader"),
)
LEVEL = {f"maxstack.{name}": depth for depth, names in enumerate(LEVELS) for name in names}
LONGEST_FILE, LONGEST_FUNCTION = 4400, 860
"""In tokens."""
SIZE = runpy.run_path(str(ROOT / "scripts" / "measure_size.py"))
SAY_NOTHING = {"util", "utils", "helper", "helpers", "manager", "base", "common", "misc"}


def part_of(module: str) -> str:
    """The entry of LEVELS that a module belongs to."""
    while module not in LEVEL:
        module = module.rpartition(".")[0]
        assert module, "a module that LEVELS does not name"
    return module


def imports(path: Path, modules: Collection[str] = MODULES) -> Iterator[tuple[int, str]]:
    """(line, module) for every import of `modules` that can run, those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in for_types:
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            assert not node.level, f"{path}:{node.lineno}: a relative import; write the whole name"
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                if inside in modules or node.module in modules:
                    yield node.lineno, inside if inside in modules else node.module or ""


@pytest.mark.parametrize("module", [name for name in MODULES if name != "maxstack"])
def test_imports_flow_one_way(module):
    own = part_of(module)
    wrong = [
        f"{MODULES[module].relative_to(ROOT)}:{line} imports {other}"
        for line, other in imports(MODULES[module])
        if other != "maxstack" and part_of(other) != own and LEVEL[part_of(other)] <= LEVEL[own]
    ]
    assert wrong == []


def test_every_level_names_modules_that_exist():
    assert LEVEL.keys() <= MODULES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    text = path.read_text(encoding="utf-8")
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    functions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lines = SIZE["token_lines"](path)
    lengths = {
        f"{module}.{node.name}": sum(node.lineno <= line <= node.end_lineno for line in lines)
        for node in functions
    }
    assert len(lines) <= LONGEST_FILE
    assert {name: n for name, n in lengths.items() if n > LONGEST_FUNCTION} == {}


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def dense_lines(path: Path) -> Iterator[int]:
    """Lines with a comprehension inside a comprehension, or with three values assigned at once."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, COMPREHENSIONS):
            inside = (inner for inner in ast.walk(node) if inner is not node)
            if any(isinstance(inner, COMPREHENSIONS) for inner in inside):
                yield node.lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 2:
                yield node.lineno


def test_code_is_not_dense():
    """A name for a step of a thought costs nothing."""
    dense = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in MODULES.values()
        for line in dense_lines(path)
    ]
    assert dense == []


def test_the_readme_states_the_size_that_is_measured():
    """`python scripts/measure_size.py --write` states it anew."""
    stated = int(SIZE["STATED"].search((ROOT / "README.md").read_text())[1].replace(",", ""))
    measured = sum(map(SIZE["tokens"], (ROOT / "maxstack").rglob("*.py")))
    assert stated == pytest.approx(measured, rel=0.01)


def test_names_of_files_and_folders_say_what_is_inside():
    names = {part for path in FILES for part in path.relative_to(ROOT).with_suffix("").parts}
    assert {name for name in names if SAY_NOTHING & set(name.split("_"))} == set()


ONLY_OURS = """
import sys
before = {*sys.modules}
from maxstack import cli
code = cli.main(sys.argv[1:])
foreign = {name.partition(".")[0] for name in {*sys.modules} - before} - sys.stdlib_module_names - {"maxstack"}
assert not foreign, foreign
sys.exit(code)
"""  # noqa: E501


@pytest.mark.parametrize("words", ["", "config show", *COMMANDS])
def test_help_imports_nothing_but_the_standard_library(words):
    command = [sys.executable, "-c", ONLY_OURS, *words.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


HEAVY = {"jax", "flax", "optax", "orbax", "grain"}
LIGHT = [
    name.removeprefix("maxstack.")
    for name in MODULES
    if name.startswith(("maxstack.config.", "maxstack.schema.", "maxstack.hf."))
    and not name.endswith("reader")
]


def test_what_reads_a_configuration_and_published_folders_imports_no_jax():
    names = ["cli", "load", "commands.config", *LIGHT]
    code = (
        f"import sys, importlib; [importlib.import_module('maxstack.' + m) for m in {names}]; "
        f"assert not {HEAVY} & {{*sys.modules}}, {HEAVY} & {{*sys.modules}}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("folder", ["maxstack", "scripts"])
def test_no_files_import_one_another_in_a_circle(folder):
    root = ROOT if folder == "maxstack" else ROOT / folder
    names = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in FILES
        if path.is_relative_to(ROOT / folder)
    }
    order = graphlib.TopologicalSorter(
        {
            name: {other for _, other in imports(path, names)} - {name}
            for name, path in names.items()
        }
    )
    order.prepare()
