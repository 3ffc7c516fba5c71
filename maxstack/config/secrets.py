"""Texts that look like secrets. A configuration is written into config.yml, reports, trackers and
manifests that others may read, so it holds none."""

import re

from maxstack.errors import ConfigError

WORDS = re.compile(
    "TOKEN|(API)?KEY|SECRETS?|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIALS?|AUTH(ORIZATION)?|BEARER"
)
"""Words in the names of variables that hold secrets."""
PLACES = "FILE", "PATH", "DIR", "SOCK", "NAME", "ID"
"""Last words of names of variables that say where a secret is."""
SWITCH = re.compile(r"(?i)|[0-9]{1,3}|true|false|on|off|yes|no|none|/\S*\.json")
"""Values that are none: switches, and the path of a file of credentials."""
SHAPE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|"
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\b(gh[pousr]_|github_pat_|glpat-)[\w-]{20,}|"
    r"\bxox[abeprs]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s@]+@"
)
"""Of tokens and keys of Hugging Face, OpenAI and those like it, Google, AWS, GitHub, GitLab and
Slack, private keys, and URLs with a password."""
ADVICE = (
    "it would stand in config.yml, manifests or trackers for others to read; give it by `secrets:` "
    "of the cluster's file (gke), in an environment variable, or a file that only you may read"
)


def check(text: str, name: str) -> None:
    """ConfigError where a text of a configuration has the shape of a secret, which is not
    quoted."""
    if found := SHAPE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise ConfigError(f"{name}:{line}: looks like a secret; {ADVICE}")


def is_secret(variable: str, value: str) -> bool:
    """True where a variable's name says that its value is a secret, and it can be one."""
    words = re.split(r"[^A-Z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", variable).upper())
    named = any(map(WORDS.fullmatch, words)) and words[-1] not in PLACES
    return named and not SWITCH.fullmatch(value)
