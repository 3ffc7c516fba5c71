"""Names that Kubernetes, registries and Google Cloud accept: the rules of a cluster file's
fields."""

import dataclasses
import re
from typing import Annotated, Any

import pydantic

from maxstack.errors import quoted

LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
COMPONENT = "[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*"
HOST = r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:))(:[0-9]+)?/"
VALUE = "[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule for a text, as the annotation of a field."""

    pattern: str
    longest: int
    words: str
    example: str

    def takes(self, text: str) -> bool:
        """Whether a text has the pattern and length."""
        return len(text) <= self.longest and re.fullmatch(self.pattern, text) is not None

    def check(self, text: str) -> str:
        """Return a text that follows the rule; ValueError, with the nearest valid text, for
        another."""
        if self.takes(text):
            return text
        lower = text.lower()
        near = filter(self.takes, (lower, lower.replace("_", "-"), self.example))
        raise ValueError(f"got {quoted(text)}; allowed: {self._allowed}, such as {next(near)}")

    @property
    def _allowed(self) -> str:
        return f"{self.words}, of at most {self.longest} characters"

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return pydantic.AfterValidator(self.check).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        bounds = {"pattern": f"^({self.pattern})$", "maxLength": self.longest}
        return handler(schema) | bounds | {"$comment": self._allowed}


Namespace = Annotated[
    str,
    Rule(LABEL, 63, "lower-case letters, digits, hyphens inside (an RFC 1123 label)", "my-team"),
]
OF_OBJECT = "lower-case letters, digits, hyphens and dots inside (an RFC 1123 subdomain)"
Object = Annotated[str, Rule(SUBDOMAIN, 253, OF_OBJECT, "my-name")]
"""Name of an object of Kubernetes ("Object Names and IDs")."""
Queue = Annotated[str, Rule(SUBDOMAIN, 63, OF_OBJECT, "my-queue")]
"""An object's name that is a label's value too, as Kueue asks for its queues and priorities."""
Label = Annotated[
    str,
    Rule(VALUE, 63, "letters, digits, and `-`, `_` and `.` inside (a label's value)", "my-value"),
]
"""The value of a Kubernetes label ("Labels and Selectors")."""
LabelKey = Annotated[
    str,
    Rule(
        rf"((?=[^/]{{1,253}}/){SUBDOMAIN}/)?(?=[^/]{{1,63}}$){VALUE}",
        317,
        "NAME or PREFIX/NAME, a name of at most 63 letters, digits, and `-`, `_` and `.` inside, "
        "a prefix that is an RFC 1123 subdomain (a label's key)",
        "example.com/team",
    ),
]
SecretKey = Annotated[
    str,
    Rule(
        r"(?!\.\.)(?!\.$)[A-Za-z0-9._-]+",
        253,
        "letters, digits, `-`, `_` and `.` (a key of a Secret)",
        "token",
    ),
]
Variable = Annotated[
    str,
    Rule(
        "[A-Za-z_][A-Za-z0-9_]*",
        253,
        "letters, digits and `_`, no digit first (an environment variable)",
        "MY_NAME",
    ),
]
Image = Annotated[
    str,
    Rule(
        rf"(?=[^@]{{1,255}}(@|$))({HOST})?{COMPONENT}(/{COMPONENT})*"
        "(:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})?(@sha256:[0-9a-f]{64})?",
        455,
        "HOST/PATH:TAG or HOST/PATH@sha256:DIGEST, the path in lower case, the digest of 64 "
        "digits (an OCI reference)",
        "us-docker.pkg.dev/my-project/my-images/maxstack:1",
    ),
]
"""A container's name, and its digest where it has one: the grammar of the OCI distribution's
reference package, in which the first part is a host where it has a dot or a port."""
Bucket = Annotated[
    str,
    Rule(
        r"(?!goog)(?!.*google)(?!([0-9]+\.){3}[0-9]+$)(?=.{3})[a-z0-9](?!.*[._-]$)"
        r"[a-z0-9_-]{0,62}(\.[a-z0-9_-]{1,63})*",
        222,
        "lower-case letters, digits, and `-`, `_` and `.` inside, of 3 at least, at most 63 "
        "between dots, without gs://, and neither an address nor with `google` (a bucket's name)",
        "my-bucket",
    ),
]
Place = Annotated[
    str,
    Rule(
        rf"({SUBDOMAIN}:)?[a-z]([-a-z0-9]*[a-z0-9])?",
        63,
        "lower-case letters, digits and hyphens inside, a letter first",
        "my-name",
    ),
]
"""A project of Google's cloud, DOMAIN:NAME in older organizations, a zone or a cluster."""
