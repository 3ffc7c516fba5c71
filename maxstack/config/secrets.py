"""Values that look like secrets. A configuration is written into config.yml, reports, trackers and
manifests that others may read, so it holds none."""

import re
from collections.abc import Iterator

from maxstack.config.reader import Node
from maxstack.errors import ConfigError

WORDS = {
    *("TOKEN", "KEY", "APIKEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "PWD"),
    *("CREDENTIAL", "CREDENTIALS", "AUTH", "AUTHORIZATION", "BEARER"),
}
"""Words in the names of variables that hold secrets."""
PLACES = {"FILE", "PATH", "DIR", "SOCK", "NAME", "ID"}
"""Last words of names of variables that say where a secret is."""
SWITCH = re.compile(r"(?i)|[0-9]{1,3}|true|false|on|off|yes|no|none|/\S*\.json")
"""Values that are none: switches, and the path of a file of credentials."""
SHAPES = {
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{20,}",
    "a key of an API": r"\bsk-[A-Za-z0-9_-]{20,}|\bAIza[A-Za-z0-9_-]{35}|\bya29\.[\w-]{20,}",
    "a key of AWS": r"\b(AKIA|ASIA)[A-Z0-9]{16}\b",
    "a token of GitHub or GitLab": r"\b(gh[pousr]_|github_pat_|glpat-)[A-Za-z0-9_-]{20,}",
    "a token of Slack": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
    "a password in a URL": r"://[^/\s:@]*:[^/\s@]+@",
}
ADVICE = (
    "it would stand in config.yml, manifests or trackers for others to read; give it by `secrets:` "
    "of the cluster's file (gke), in an environment variable, or a file that only you may read"
)
_SHAPE = re.compile("|".join(f"({shape.replace('(', '(?:')})" for shape in SHAPES.values()))


def check(tree: Node) -> None:
    """ConfigError for a text of a configuration that has the shape of a secret, which is not
    quoted."""
    for where, key, value in _texts(tree, ""):
        if found := _SHAPE.search(value):
            what = [*SHAPES][(found.lastindex or 1) - 1]
            raise ConfigError(f"{where}: {key}: looks like {what}; {ADVICE}")


def is_secret(name: str, value: str) -> bool:
    """True where a variable's name says that its value is a secret, and it can be one."""
    words = re.split(r"[^A-Z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    return bool(WORDS & {*words}) and words[-1] not in PLACES and not SWITCH.fullmatch(value)


def _texts(node: Node, key: str) -> Iterator[tuple[str, str, str]]:
    """(where, key, text) of all texts below a node, keys of mappings too."""
    if isinstance(node.value, str):
        yield node.where, key.lstrip("."), node.value
        return
    entries = node.mapping or {}
    if isinstance(node.value, list):
        entries = {f"{index}": item for index, item in enumerate(node.value)}
    for name, item in entries.items():
        yield from _texts(item, f"{key}.{name}")
