"""Other upstreams, through LiteLLM: one more engine, so that there is one path through the proxy.

Owns which of two it is. `hosted_vllm/NAME` is a vLLM server, asked for token ids and log-probabilities: its sessions are exact
(`litellm_vllm.py`). Every other provider gives text (`litellm_text.py`, where litellm is imported, and nowhere else).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from pydantic import SecretStr

from inference_worker.engines.base import Engine, Tally
from inference_worker.engines.options import engine_options
from inference_worker.weights.fixed import FixedWeights
from proxy.contracts.canonical import Job
from proxy.contracts.errors import ConfigError, EngineFailed
from proxy.contracts.frames import Generate, ModelCard, StreamEvent

logger = logging.getLogger(__name__)
VLLM = "hosted_vllm/"
OPTIONS = {
    "timeout_s": (600.0, "seconds of silence after which a request to the upstream fails"),
    "tokens": ("auto", "from a vLLM server: require, auto (text, where the server can't), off (text)"),
    "images": ("auto", "whether agents may send images, as text goes: on, off, auto (as LiteLLM knows the model)"),
}
"""Engine arguments: name -> (default, meaning)."""
NEEDS = "engine litellm needs {}: pip install '.[litellm]' in the checkout"
IMAGES = {"auto": None, "on": True, "off": False}


class Settings(Protocol):
    """What `build` reads of the worker's settings."""

    model: str | None
    api_base: str | None
    api_key: SecretStr | None
    policy: str
    context_tokens: int | None
    max_streams: int
    engine_args: Sequence[str]


def build(settings: Settings) -> Engine:
    """Raises: ConfigError naming the setting."""
    if not settings.model:
        raise ConfigError("model: the litellm engine needs --model PROVIDER/MODEL, as LiteLLM names it", field="model")
    options = engine_options(settings.engine_args, {name: default for name, (default, _) in OPTIONS.items()})
    tokens, timeout_s = options["tokens"], options["timeout_s"]
    if tokens not in ("require", "auto", "off"):
        raise ConfigError(f"engine_args: tokens: {tokens!r} is none of require, auto, off", field="engine_args")
    if options["images"] not in IMAGES:
        raise ConfigError(
            f"engine_args: images: {options['images']!r} is none of {', '.join(IMAGES)}", field="engine_args"
        )
    images = IMAGES[options["images"]]
    if settings.model.startswith(VLLM) and tokens != "off":
        return VllmUpstream(
            lambda: exact_engine(settings, timeout_s),
            (lambda: text_engine(settings, timeout_s, images)) if tokens == "auto" else None,
        )
    if tokens == "require":
        raise ConfigError(f"engine_args: tokens: only a vLLM server gives them (model {VLLM}NAME)", field="engine_args")
    return text_engine(settings, timeout_s, images)


def text_engine(settings: Settings, timeout_s: float, images: bool | None = None) -> Engine:
    """Raises: ConfigError: litellm is not installed, or knows no such provider."""
    try:
        from inference_worker.engines.litellm_text import TextEngine
    except ImportError as error:
        raise ConfigError(NEEDS.format(error.name), field="engine") from error
    return TextEngine(
        settings.model or "",
        api_base=settings.api_base,
        key=_key(settings),
        policy=settings.policy,
        context_tokens=settings.context_tokens,
        timeout_s=timeout_s,
        max_streams=settings.max_streams,
        images=images,
    )


def exact_engine(settings: Settings, timeout_s: float) -> Engine:
    """Raises: ConfigError: aiohttp is not installed; no URL."""
    try:
        from inference_worker.engines.litellm_vllm import VllmServerEngine
        from inference_worker.engines.litellm_vllm_http import VllmServer
    except ImportError as error:
        raise ConfigError(NEEDS.format(error.name), field="engine") from error
    # The names that LiteLLM looks for.
    base = settings.api_base or os.environ.get("HOSTED_VLLM_API_BASE")
    key = _key(settings) or os.environ.get("HOSTED_VLLM_API_KEY") or ""
    return VllmServerEngine(
        VllmServer(base, key, timeout_s),
        (settings.model or "").removeprefix(VLLM),
        policy=settings.policy,
        context_tokens=settings.context_tokens,
        max_streams=settings.max_streams,
    )


class VllmUpstream(FixedWeights):
    """An `Engine` that is exact where the server can be, and else text, or nothing (`text` None). Decided once, at start."""

    def __init__(self, exact: Callable[[], Engine], text: Callable[[], Engine] | None) -> None:
        """Raises: ConfigError: as `exact_engine`."""
        self._engine = exact()
        self._text = text

    async def start(self) -> None:
        """Raises: ConfigError: the server can't be reached, serves no such model, or is not exact as it must be."""
        from inference_worker.engines.litellm_vllm_probe import NotExact

        try:
            await self._engine.start()
        except NotExact as error:
            await self._engine.stop()
            if self._text is None:
                raise ConfigError(
                    f"the server can't serve exact records: {error.message}", field="engine_args"
                ) from error
            logger.warning("the server can't serve exact records, its sessions will be text_only: %s", error.message)
            self._engine = self._text()
            await self._engine.start()
        except EngineFailed as error:
            await self._engine.stop()
            raise ConfigError(f"api_base: {error.message}", field="api_base") from error
        except BaseException:
            await self._engine.stop()
            raise

    async def stop(self) -> None:
        await self._engine.stop()

    @property
    def tally(self) -> Tally:
        return self._engine.tally

    def cards(self) -> list[ModelCard]:
        return self._engine.cards()

    def load(self) -> tuple[int, int, float]:
        return self._engine.load()

    async def count(self, job: Job) -> int:
        return await self._engine.count(job)

    def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        return self._engine.generate(request)


def _key(settings: Settings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None
