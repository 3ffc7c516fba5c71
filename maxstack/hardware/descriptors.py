"""How many files and connections a process may have open."""

import resource


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted` where that is allowed -> the limit.
    Systems begin with 1,024."""
    soft, hard = (
        wanted if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < wanted:
        soft = min(wanted, hard)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
    return soft
