"""Whether a reference's token ids mean what the policy's mean: it would score other words otherwise, and nothing would fail."""

from __future__ import annotations

from typing import NamedTuple

from steno.contracts.errors import ConfigError

UNKNOWN = "reference: whether its ids mean the same is not known:"


class CommonTokens(NamedTuple):
    """below: ids from it on are none of the reference's tokens; None: that is not known. lacking: ids below it that are tokens of
    the model alone. warning: for the operator."""

    below: int | None = None
    lacking: frozenset[int] = frozenset()
    warning: str | None = None


def common_tokens(model: str, reference: str, *, trust_remote_code: bool = False) -> CommonTokens:
    """Ids that only one of the two has may differ: models of one family have a few more or less.

    Raises: ConfigError: names `reference`, and an id that is one token here and another one there.
    """
    found = {}
    for name in (model, reference):
        try:
            found[name] = _tokens(name, trust_remote_code)
        except Exception as error:  # of many kinds, and training needs no tokenizer
            return CommonTokens(
                warning=f"{UNKNOWN} the tokenizer of {name} can't be read: {type(error).__name__}: {error}"
            )
        if not found[name]:
            return CommonTokens(warning=f"{UNKNOWN} {name} has no tokenizer")
    ours, theirs = found[model], found[reference]
    differ = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    if differ:
        first = differ[0]
        raise ConfigError(
            f"reference: got {reference}, must have the tokens of {model}: {len(differ)} ids differ; {first} is {theirs[first]!r}"
            f" there and {ours[first]!r} in the model",
            field="reference",
        )
    below = max(theirs) + 1
    missing = sorted(ours.keys() - theirs.keys())
    if not missing:
        return CommonTokens(below)
    return CommonTokens(
        below,
        frozenset(token for token in missing if token < below),
        f"reference: {reference} lacks {len(missing)} tokens of {model}, {missing[0]} ({ours[missing[0]]!r}) and others: samples "
        "with these are not trained (malformed)",
    )


def _tokens(name: str, trust_remote_code: bool) -> dict[int, str]:
    """By id; none: there is no tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    found = tokenizer.get_vocab()
    if found.keys() <= set(tokenizer.all_special_tokens):
        return {}  # transformers makes one up where there is none, of special tokens alone
    return {number: token for token, number in found.items()}
