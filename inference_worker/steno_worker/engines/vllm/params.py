"""Translates a request's sampling law to vLLM's parameters."""

from __future__ import annotations

from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from steno.contracts.chat import Job, Sampling
from steno.contracts.errors import BadRequest
from steno_worker.engines.vllm.chat_format import VllmGrammar

_MIN_TEMPERATURE = 0.01
"""vLLM quietly samples at this temperature when asked for a lower one above 0."""


def sampling_params(law: Sampling, job: Job, grammar: VllmGrammar | None, stop_ids: frozenset[int]) -> SamplingParams:
    """The law in vLLM's words. Everything is said, since vLLM's defaults are those of its HTTP API.

    Raises: BadRequest: a value that vLLM refuses, or would change without saying so.
    """
    if 0.0 < law.temperature < _MIN_TEMPERATURE:
        raise BadRequest(
            f"temperature: got {law.temperature}, must be 0 or at least {_MIN_TEMPERATURE}", field="temperature"
        )
    try:
        return SamplingParams(
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
