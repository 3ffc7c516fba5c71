"""Names of runs that every cluster accepts, for DNS, labels and folders."""

import hashlib
import re

LONGEST = 40
"""Characters that xpk allows, and DNS with the names of a JobSet's jobs and pods appended."""
PLAIN = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def safe_name(name: str) -> str:
    """Return `name` if it is short lower case letters, digits and single hyphens that begin with a
    letter; else a cleaned name with a hash of the whole, so that different names stay different."""
    if PLAIN.fullmatch(name) and len(name) <= LONGEST:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower().encode("ascii", "ignore").decode()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".strip("-")
    return f"{plain[: LONGEST - len(digest) - 1].rstrip('-')}-{digest}"
