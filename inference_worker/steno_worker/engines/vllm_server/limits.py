"""Refuses what would crash vLLM's engine, or be changed by it without a word, though vLLM's API accepts it.

vLLM's second model runner (the default on NVIDIA GPUs) looks at some sizes only in the engine's step, where an error is the
end of the engine and of all that it runs (I8). Pure; without vLLM, since it is of those behind HTTP too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from steno.contracts.chat import Sampling
from steno.contracts.errors import BadRequest

MIN_TEMPERATURE = 0.01
"""vLLM quietly samples at this temperature when asked for a lower one above 0 (I1)."""
MAX_BIASES = 1024
MAX_ALLOWED_IDS = 1024
MAX_STOP_IDS = 128
"""All that end a completion, the model's own included; they count where `min_tokens` holds them back."""
UNSEEN_STOP_IDS = 16
"""Room left for a server's ends that its template never writes: its generation config has a few, and tells nobody."""
MAX_BAD_WORD_TOKENS = 1024
"""Of all bad words together. vLLM's default: the environment variable VLLM_MAX_BAD_WORDS_TOTAL_TOKENS changes it there."""


def check_law(law: Sampling, stop_ids: Collection[int], *, unseen: int = 0) -> None:
    """All but the bad words, which take a tokenizer to count.

    Args: stop_ids: the model's own. unseen: how many more it may have.

    Raises: BadRequest naming the field.
    """
    if 0.0 < law.temperature < MIN_TEMPERATURE:
        raise BadRequest(
            f"temperature: got {law.temperature}, must be 0 or at least {MIN_TEMPERATURE}", field="temperature"
        )
    _check_count("logit_bias", len(law.logit_bias), MAX_BIASES)
    _check_count("allowed_token_ids", len(law.allowed_token_ids), MAX_ALLOWED_IDS)
    stops = {*law.stop_token_ids, *stop_ids}
    most = MAX_STOP_IDS - unseen
    if law.min_tokens > 0 and len(stops) > most:
        raise BadRequest(
            f"stop_token_ids: got {len(set(law.stop_token_ids))} ids, {len(stops)} with the model's own; "
            f"must be at most {most} in all where min_tokens is above 0",
            field="stop_token_ids",
        )


def too_many_bad_word_tokens(count: int, most: int = MAX_BAD_WORD_TOKENS) -> str:
    """What is said of bad words that are refused."""
    return f"bad_words: got {count} tokens in all, must be at most {most}"


def forms_of(word: str) -> tuple[str, str]:
    """The texts of a bad word that vLLM tokenises: at the beginning of a text, and in the middle."""
    plain = word.lstrip()
    return plain, " " + plain


def tokens_of(plain: Sequence[int], spaced: Sequence[int]) -> int:
    """How many tokens vLLM has of a bad word, from the ids of its two forms: the second counts only where it is another word."""
    is_other = bool(plain) and bool(spaced) and spaced[0] != plain[0] and len(spaced) == len(plain)
    return len(plain) + (len(spaced) if is_other else 0)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise BadRequest(f"{field}: got {count} ids, must be at most {most}", field=field)
