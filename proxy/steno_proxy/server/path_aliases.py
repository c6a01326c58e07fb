"""Maps paths of clients whose base URL is a level too high or too deep, or ends in a slash, to the path that they mean.

Pure. Few words can follow the trial id, so each of these paths has only one meaning.
"""

from __future__ import annotations

VERSIONS = frozenset({"v1", "v1beta", "v1alpha"})
FIRST_WORDS = frozenset({"chat", "completions", "messages", "models", "responses"})
"""First words of the agents' routes, after the version."""
_BESIDE = frozenset({"detokenize", "health", "ping", "tokenize", "version"})
"""What vLLM has beside its `/v1`."""


def meant(path: str) -> str:
    """A path after the trial id as the routes have it: `/chat/completions`, `/v1//chat/completions/` and
    `/v1/v1/chat/completions` are `/v1/chat/completions`, `//tokenize` and `/v1/tokenize` are `/tokenize`. Of two versions the
    second counts. Anything else is as it was.
    """
    words = [word for word in path.split("/") if word]
    versions = words[:2] if words[1:2] and VERSIONS.issuperset(words[:2]) else [w for w in words[:1] if w in VERSIONS]
    rest = words[len(versions) :]
    if len(rest) == 1 and rest[0] in _BESIDE:
        return f"/{rest[0]}"
    if not rest or rest[0].partition(":")[0] not in FIRST_WORDS:
        return path
    return "/".join(["", versions[-1] if versions else "v1", *rest])
