"""How many descriptors a process of tests may have, and the programs that it starts."""

from __future__ import annotations

import resource

MANY = 65536


def allow_many() -> None:
    """Thousands of connections and streams are open in some tests; a login shell allows 1,024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY if hard == resource.RLIM_INFINITY else min(hard, MANY)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
