"""TRL's trainers on agents that Steno records: `AsyncRollouts` for `AsyncGRPOTrainer`, `PromptRollouts` for `GRPOTrainer`.

    with Collector(proxy, run, agent=play) as collector:
        rollouts = AsyncRollouts(collector, tasks, n=8)
        trainer = rollouts.trainer(MODEL, AsyncGRPOConfig("out", max_steps=100, per_device_train_batch_size=48))
        trainer.train()

Made for one release of TRL, whose seams are experimental: another one is refused on import.
"""

from importlib.metadata import PackageNotFoundError, version

from steno.contracts.errors import ConfigError

TRL_VERSIONS = ("1.16.0",)
"""Releases that the tests of this adapter were run with."""


def check_version(found: str | None) -> None:
    """Raises: ConfigError: this release of TRL was not run with the adapter, or there is none."""
    if found not in TRL_VERSIONS:
        here = f"trl {found} is installed" if found else "trl is not installed"
        raise ConfigError(
            f"{here}; steno_adapters.trl was run with {', '.join(TRL_VERSIONS)} only: pip install 'trl=={TRL_VERSIONS[-1]}'",
            field="trl",
        )


def _installed() -> str | None:
    try:
        return version("trl")
    except PackageNotFoundError:
        return None


check_version(_installed())

from steno_adapters.trl.async_rollouts import AsyncRollouts  # noqa: E402
from steno_adapters.trl.failed_groups import NothingToTrain  # noqa: E402
from steno_adapters.trl.prompt_rollouts import PromptRollouts  # noqa: E402

__all__ = ["TRL_VERSIONS", "AsyncRollouts", "NothingToTrain", "PromptRollouts"]
