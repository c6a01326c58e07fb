"""Other upstreams, through LiteLLM: one more engine, so that there is one path through the proxy.

Owns which of two it is. `hosted_vllm/NAME` is a vLLM server, asked for token ids and log-probabilities: its sessions are exact
(`engines/vllm_server/engine.py`). Every other provider gives text (`text.py`, where litellm is imported, and nowhere else).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from pydantic import SecretStr

from steno.config.extras import how_to_install
from steno.contracts.chat import Job
from steno.contracts.errors import ConfigError, EngineFailed
from steno.contracts.wire.frames import Count, Counted, Generate, ModelCard, StreamEvent
from steno_worker.engines.options import engine_options
from steno_worker.interfaces import MAX_STREAMS, Engine, TokenTally
from steno_worker.weights.fixed import FixedWeights

logger = logging.getLogger(__name__)
VLLM = "hosted_vllm/"
OPTIONS = {
    "timeout_s": (600.0, "seconds of silence after which a request to the upstream fails"),
    "tokens": (
        "auto",
        "record token ids from a vLLM server: require, auto (text only if the server can't give them), off",
    ),
    "images": (
        "auto",
        "whether the model takes images, if no token ids are recorded: on, off, auto (as LiteLLM's table says)",
    ),
}
"""Engine arguments: name -> (default, meaning)."""
IMAGES = {"auto": None, "on": True, "off": False}


class LiteLLMSettings(Protocol):
    """What `build` reads of the worker's settings."""

    model: str | None
    api_base: str | None
    api_key: SecretStr | None
    policy: str
    context_tokens: int | None
    max_streams: int | None
    engine_args: Sequence[str]


def build(settings: LiteLLMSettings) -> Engine:
    """The engine for an upstream behind LiteLLM. Raises: ConfigError naming the setting."""
    if not settings.model:
        raise ConfigError("model: the litellm engine needs --model PROVIDER/MODEL, as LiteLLM names it", field="model")
    options = engine_options(settings.engine_args, {name: default for name, (default, _) in OPTIONS.items()})
    tokens, timeout_s = options["tokens"], options["timeout_s"]
    if tokens not in ("require", "auto", "off"):
        raise ConfigError(
            f"engine_args: tokens: got {tokens!r}, must be one of require, auto, off", field="engine_args"
        )
    if options["images"] not in IMAGES:
        raise ConfigError(
            f"engine_args: images: got {options['images']!r}, must be one of {', '.join(IMAGES)}", field="engine_args"
        )
    images = IMAGES[options["images"]]
    if settings.model.startswith(VLLM) and tokens != "off":
        return VllmUpstream(
            lambda: exact_engine(settings, timeout_s),
            (lambda: text_engine(settings, timeout_s, images)) if tokens == "auto" else None,
        )
    if tokens == "require":
        raise ConfigError(f"engine_args: tokens: require needs a vLLM server (model {VLLM}NAME)", field="engine_args")
    return text_engine(settings, timeout_s, images)


def text_engine(settings: LiteLLMSettings, timeout_s: float, images: bool | None = None) -> Engine:
    """Raises: ConfigError: litellm is not installed, or knows no such provider."""
    try:
        from steno_worker.engines.litellm.text import TextEngine
    except ImportError as error:
        raise ConfigError(f"engine litellm needs {error.name}: {how_to_install('litellm')}", field="engine") from error
    return TextEngine(
        settings.model or "",
        api_base=settings.api_base,
        key=_key(settings),
        policy=settings.policy,
        context_tokens=settings.context_tokens,
        timeout_s=timeout_s,
        max_streams=settings.max_streams or MAX_STREAMS,
        images=images,
    )


def exact_engine(settings: LiteLLMSettings, timeout_s: float) -> Engine:
    """Raises: ConfigError: aiohttp is not installed; no URL."""
    try:
        from steno_worker.engines.vllm_server.engine import VllmServerEngine
        from steno_worker.engines.vllm_server.http import VllmServer
    except ImportError as error:
        raise ConfigError(f"engine litellm needs {error.name}: {how_to_install('litellm')}", field="engine") from error
    # The names that LiteLLM looks for.
    base = settings.api_base or os.environ.get("HOSTED_VLLM_API_BASE")
    key = _key(settings) or os.environ.get("HOSTED_VLLM_API_KEY") or ""
    return VllmServerEngine(
        VllmServer(base, key, timeout_s),
        (settings.model or "").removeprefix(VLLM),
        policy=settings.policy,
        context_tokens=settings.context_tokens,
        max_streams=settings.max_streams or MAX_STREAMS,
    )


class VllmUpstream(FixedWeights):
    """An `Engine` that is exact where the server can be, and else text, or nothing (`text` None). Decided once, at start."""

    def __init__(self, exact: Callable[[], Engine], text: Callable[[], Engine] | None) -> None:
        """Raises: ConfigError: as `exact_engine`."""
        self._engine = exact()
        self._text = text

    async def start(self) -> None:
        """Raises: ConfigError: the server can't be reached, serves no such model, or is not exact as it must be."""
        from steno_worker.engines.vllm_server.probe import InexactServer

        try:
            await self._engine.start()
        except InexactServer as error:
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
    def tally(self) -> TokenTally:
        return self._engine.tally

    def cards(self) -> list[ModelCard]:
        return self._engine.cards()

    def load(self) -> tuple[int, int, float]:
        return self._engine.load()

    async def count(self, job: Job) -> int:
        return await self._engine.count(job)

    async def tokenize(self, asked: Count) -> Counted:
        return await self._engine.tokenize(asked)

    def generate(self, request: Generate) -> AsyncIterator[StreamEvent]:
        return self._engine.generate(request)


def _key(settings: LiteLLMSettings) -> str | None:
    return settings.api_key.get_secret_value() if settings.api_key else None
