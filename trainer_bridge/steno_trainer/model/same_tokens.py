"""Whether a reference's token ids mean what the policy's mean: it would score other words otherwise, and nothing would fail."""

from __future__ import annotations

from pathlib import Path

from steno.contracts.errors import ConfigError


def check_same_tokens(model: str, reference: str, *, trust_remote_code: bool = False) -> None:
    """Ids that only one of the two has may differ: models of one family have a few more or less. A directory without a tokenizer
    is not looked at.

    Raises: ConfigError: names `reference`, and an id that is one token here and another one there.
    """
    ours, theirs = (_tokens(name, trust_remote_code) for name in (model, reference))
    differ = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    if differ:
        first = differ[0]
        raise ConfigError(
            f"reference: got {reference}, must have the tokens of {model}: {len(differ)} ids differ; {first} is {theirs[first]!r}"
            f" there and {ours[first]!r} in the model",
            field="reference",
        )


def _tokens(name: str, trust_remote_code: bool) -> dict[int, str]:
    """By id; none: there is no tokenizer."""
    from transformers import AutoTokenizer

    folder = Path(name)
    if folder.is_dir() and not any(found for kind in ("tokenizer*", "vocab*") for found in folder.glob(kind)):
        return {}  # transformers would make one up, of the special tokens alone
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return {}
    return {number: token for token, number in tokenizer.get_vocab().items()}
