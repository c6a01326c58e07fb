"""Translates a request's sampling law to vLLM's parameters."""

from __future__ import annotations

from typing import Any

import vllm.envs as envs
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest
from steno_worker.engines.vllm.chat_format import VllmGrammar
from steno_worker.engines.vllm_server.limits import check_law, too_many_bad_word_tokens


class BadWordsRefused(VLLMClientError):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Of bad words that are too many tokens. `parameter` names the field, as in vLLM's own refusals."""

    parameter = "bad_words"


class BoundedParams(SamplingParams):  # type: ignore[misc]
    """Refuses too many tokens of bad words where vLLM counts them, in the process that takes requests. vLLM itself refuses them
    in the engine's step, which ends the engine (I8)."""

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Raises: BadWordsRefused, and whatever vLLM raises."""
        super().update_from_tokenizer(tokenizer)
        count = sum(len(ids) for ids in self.bad_words_token_ids or ())
        if count > envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS:
            raise BadWordsRefused(too_many_bad_word_tokens(count, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS))


def sampling_params(law: Sampling, job: Job, grammar: VllmGrammar | None, stop_ids: frozenset[int]) -> SamplingParams:
    """The law in vLLM's words. Everything is said, since vLLM's defaults are those of its HTTP API.

    Raises: BadRequest: a value that vLLM refuses, would change without saying so, or would die of.
    """
    check_law(law, stop_ids)
    try:
        return BoundedParams(
            n=1,
            temperature=law.temperature,
            top_p=law.top_p,
            top_k=max(law.top_k, 0),
            min_p=law.min_p,
            presence_penalty=law.presence_penalty,
            frequency_penalty=law.frequency_penalty,
            repetition_penalty=law.repetition_penalty,
            logit_bias=dict(law.logit_bias) or None,
            min_tokens=law.min_tokens,
            max_tokens=law.max_tokens,
            seed=law.seed,
            stop_token_ids=[*law.stop_token_ids, *(() if law.ignore_eos else stop_ids)],
            ignore_eos=law.ignore_eos,
            allowed_token_ids=list(law.allowed_token_ids) or None,
            bad_words=list(law.bad_words) or None,
            logprobs=job.top_logprobs or 0,  # None would switch them off
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=grammar.outputs if grammar else None,
            watermarking=False,
        )
    except (VLLMClientError, ValueError, TypeError) as error:
        raise BadRequest(str(error), field=getattr(error, "parameter", None)) from error
