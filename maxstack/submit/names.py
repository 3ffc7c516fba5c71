"""Names that every cluster takes: of a run, for DNS, labels and folders."""

import hashlib
import re

LONGEST = 40
"""What xpk allows; with the names of a JobSet's jobs and pods behind it, DNS allows no more
either."""
PLAIN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def safe(name: str) -> str:
    """`name` where it is lower case letters, digits and single hyphens, begins with a letter and is
    short; else as much of it as is, and a hash of all of it, so that two names never become one."""
    if PLAIN.fullmatch(name) and len(name) <= LONGEST:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    kept = re.sub(r"[^a-z0-9]+", "-", name.lower().encode("ascii", "ignore").decode()).strip("-")
    kept = kept if kept[:1].isalpha() else f"run-{kept}".strip("-")
    return f"{kept[: LONGEST - len(digest) - 1].rstrip('-')}-{digest}"
