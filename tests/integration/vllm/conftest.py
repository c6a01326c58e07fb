"""One real engine per test session, on a tiny random model: float32, eager, on whatever CPU there is.

    <python of the vLLM environment> -m pytest tests/integration/vllm

Environments without vLLM do not collect these: `.ci/run` runs them in the one that has it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes half of the machine
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    import pytest_asyncio
    from transformers import Qwen3ForCausalLM

    from steno_worker.engines.vllm.args import EngineArgs, from_fields
    from steno_worker.engines.vllm.engine import VllmTokens
    from tests.integration.vllm.model import CONTEXT_TOKENS, make
    from tests.support.programs import forked_engines

    FORKED = forked_engines  # the engines of these tests' own process are forks of it

    @pytest.fixture(scope="session")
    def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make(tmp_path_factory.mktemp("qwen3"))

    @pytest.fixture(scope="session")
    def engine_args(model_dir: Path) -> EngineArgs:
        fields = {
            "model": str(model_dir),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": CONTEXT_TOKENS,
            "max_num_seqs": 16,
            "enable_prefix_caching": True,
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
        }
        return from_fields(fields)

    @pytest.fixture(scope="session")
    def reference(model_dir: Path) -> Qwen3ForCausalLM:
        """The same weights in transformers, float32."""
        return Qwen3ForCausalLM.from_pretrained(model_dir).eval()

    @pytest_asyncio.fixture(scope="session", loop_scope="session")
    async def tokens(engine_args: EngineArgs) -> AsyncIterator[VllmTokens]:
        engine = VllmTokens(engine_args)
        await engine.start()
        yield engine
        await engine.stop()
