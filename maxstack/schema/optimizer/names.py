"""Names and signatures of Optax's public functions, read from its source text so that a
configuration is checked before jax is imported."""

import ast
import dataclasses
import functools
import importlib.util
import pathlib

PACKAGES = ("optax", "optax.contrib")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a public function, as its source writes it."""

    name: str
    kind: str
    """positional, keyword, or variadic."""
    annotation: str = ""
    default: str | None = None
    """Source text of the default; None: the argument must be given."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """A public function: where it lives, what it returns and what it takes."""

    name: str
    package: str
    role: str
    """transform, schedule, or other."""
    arguments: tuple[Argument, ...]

    def __getitem__(self, name: str) -> Argument:
        return next(argument for argument in self.arguments if argument.name == name)

    def __contains__(self, name: str) -> bool:
        return any(argument.name == name for argument in self.arguments)


@functools.cache
def signature(name: str) -> Signature | None:
    """The public function `name` of optax or optax.contrib; None when there is none."""
    for package in PACKAGES:
        found = (
            _lookup(_package_file(package), name)
            if name in _bindings(_package_file(package)) and not name.startswith("_")
            else None
        )
        if found is not None:
            return _signature(name, package, *found)
    return None


@functools.cache
def names(role: str) -> tuple[str, ...]:
    """All public names of a role, sorted."""
    public = {
        name
        for package in PACKAGES
        for name in _bindings(_package_file(package))
        if not name.startswith("_")
    }
    return tuple(
        sorted(name for name in public if (found := signature(name)) and found.role == role)
    )


Found = tuple[ast.FunctionDef | ast.ClassDef, dict[str, str]]


@functools.cache
def _root() -> pathlib.Path:
    spec = importlib.util.find_spec("optax")
    assert spec is not None and spec.origin is not None, "optax is a dependency of this package"
    return pathlib.Path(spec.origin).parent


def _package_file(dotted: str) -> pathlib.Path:
    base = _root().joinpath(*dotted.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@functools.cache
def _bindings(file: pathlib.Path) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            found[statement.name] = statement
        elif isinstance(statement, ast.ImportFrom):
            found.update((alias.asname or alias.name, statement) for alias in statement.names)
        elif isinstance(statement, ast.Assign):
            found.update(
                (target.id, statement)
                for target in statement.targets
                if isinstance(target, ast.Name)
            )
    return found


def _lookup(file: pathlib.Path, name: str) -> Found | None:
    """The definition behind a name, through imports, assignments and functools.partial, with the
    defaults that the latter sets."""
    statement = _bindings(file).get(name)
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return statement, {}
    if isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[0] == "optax":
        original = next(
            alias.name for alias in statement.names if (alias.asname or alias.name) == name
        )
        source = _package_file(statement.module or "")
        return (
            _lookup(source, original) if (source, original) != (file, name) else None
        )  # a package that imports its own module
    return _evaluate(file, statement.value) if isinstance(statement, ast.Assign) else None


def _evaluate(file: pathlib.Path, value: ast.expr) -> Found | None:
    if isinstance(value, ast.Name):
        return _lookup(file, value.id)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        module = _bindings(file).get(value.value.id)
        if isinstance(module, ast.ImportFrom) and (module.module or "").split(".")[0] == "optax":
            return _lookup(_package_file(f"{module.module}.{value.value.id}"), value.attr)
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("functools.partial", "partial"):
        found = _evaluate(file, value.args[0])
        if found:
            return found[0], found[1] | {
                keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords if keyword.arg
            }
    return None


def _signature(
    name: str, package: str, node: ast.FunctionDef | ast.ClassDef, fixed: dict[str, str]
) -> Signature:
    if isinstance(node, ast.ClassDef):
        init = next(
            (
                item
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name == "__init__"
            ),
            None,
        )
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        role = "transform" if {"init", "update", "gradient_transformation"} <= methods else "other"
        return Signature(name, package, role, _arguments(init.args, fixed)[1:] if init else ())
    return Signature(name, package, _role(node), _arguments(node.args, fixed))


def _role(node: ast.FunctionDef) -> str:
    annotation = ast.unparse(node.returns) if node.returns else ""
    if annotation.split(".")[-1] == "Schedule":
        return "schedule"
    if annotation.split(".")[-1] in ("GradientTransformation", "GradientTransformationExtraArgs"):
        return "transform"
    last = node.body[-1]
    called = (
        ast.unparse(last.value.func).split(".")[-1]
        if isinstance(last, ast.Return) and isinstance(last.value, ast.Call)
        else ""
    )
    return (
        "transform"
        if not annotation
        and called in ("GradientTransformation", "GradientTransformationExtraArgs", "chain")
        else "other"
    )


def _arguments(args: ast.arguments, fixed: dict[str, str]) -> tuple[Argument, ...]:
    """What functools.partial fixes by keyword, and all that follows it, can be given by keyword
    only, as inspect.signature has it."""

    def argument(arg: ast.arg, kind: str, default: ast.expr | None) -> Argument:
        text = fixed.get(arg.arg, ast.unparse(default) if default is not None else None)
        return Argument(arg.arg, kind, ast.unparse(arg.annotation) if arg.annotation else "", text)

    positional = [*args.posonlyargs, *args.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    found = [
        argument(arg, "positional", default)
        for arg, default in zip(positional, padding + list(args.defaults), strict=True)
    ]
    if args.vararg:
        found.append(Argument(args.vararg.arg, "variadic"))
    found += [
        argument(arg, "keyword", default)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    first = next((i for i, arg in enumerate(found) if arg.name in fixed), len(found))
    return tuple(
        dataclasses.replace(arg, kind="keyword") if i >= first else arg
        for i, arg in enumerate(found)
    )
