"""The last reported load of vLLM's schedulers."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats


class VllmLoad(StatLoggerBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The last word of each engine's scheduler (one per data-parallel rank) on its queue and cache."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._last: dict[int, SchedulerStats] = {}

    @property
    def waiting(self) -> int:
        return sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in self._last.values())

    @property
    def kv_used(self) -> float:
        return max((float(stats.kv_cache_usage) for stats in self._last.values()), default=0.0)

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._last[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        return None
