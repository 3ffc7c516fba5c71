"""Detects secrets, by the shapes of known services' keys and by the names of variables. A
configuration must hold none: it is written into config.yml, reports, trackers and manifests that
others may read."""

import re

from maxstack.errors import ConfigError

WORDS = re.compile(
    "[A-Z]*TOKEN|(API)?KEY|SECRETS?|(PG)?PASS(WORD|WD|PHRASE)?|PWD|CREDENTIALS?|"
    "AUTH(ORIZATION)?|BEARER|PAT|DSN|JWT|COOKIE|WEBHOOK"
)
"""Words in the names of variables that hold secrets."""
PLACES = "FILE", "PATH", "DIR", "SOCK", "NAME", "ID"
"""Last words of variable names that tell where a secret is."""
SWITCH = re.compile(r"(?i)|[0-9]{1,3}|true|false|on|off|yes|no|none|/\S*\.json")
"""Values that are no secrets: switches, and paths of credential files."""
SHAPE = re.compile(
    r"(?<![A-Za-z0-9])(hf_[A-Za-z0-9]{34}|sk-(proj-|ant-|svcacct-)[\w-]{20,}|sk-[A-Za-z0-9]{32,}|"
    r"AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|wandb_v1_\w{20,}|"
    r"(AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])|(gh[pousr]_|github_pat_|glpat-)[\w-]{20,}|"
    r"xox[abeprs]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s@]+@|https?://[^/\s@]{16,}@|"
    r"[?&](sig|signature|token|access_token|X-(Amz|Goog)-Signature)=[^&\s]{8,}"
)
"""Keys and tokens of Hugging Face, OpenAI and similar services, Google, W&B, AWS, GitHub, GitLab
and Slack, JSON Web Tokens, private keys, and URLs that are signed or hold a token or password."""
ADVICE = (
    "it would stand in config.yml, manifests or trackers for others to read; give it by `secrets:` "
    "of the cluster's file (gke), in an environment variable, or a file that only you may read"
)


def check(text: str, where: str) -> None:
    """ConfigError where a key or text of a configuration looks like a secret; the message does not
    quote it."""
    # Shapes of known services, not entropy: hashes and commits in a configuration are as random as
    # a key.
    if SHAPE.search(text):
        raise ConfigError(f"{where}: looks like a secret; {ADVICE}")


def is_secret(variable: str, value: str) -> bool:
    """Whether a variable's name says that its value is a secret, and the value can be one."""
    # camelCase is split first, so that apiKey and API_KEY have the same words.
    words = re.split(r"[^A-Z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", variable).upper())
    named = any(map(WORDS.fullmatch, words)) and words[-1] not in PLACES
    return named and not SWITCH.fullmatch(value)
