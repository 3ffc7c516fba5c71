"""The limit of open files and connections."""

import resource


def allow_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, or as far as the system allows; return
    how many of these may be open. The usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
