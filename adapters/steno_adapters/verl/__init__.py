"""Agents that you did not write, in a run of verl: `RemoteAgentLoop`.

    actor_rollout_ref.rollout.agent.agent_loop_config_path=steno-loop.yaml
    actor_rollout_ref.rollout.agent.agent_loop_manager_class=steno_adapters.verl.manager.StenoAgentLoopManager

verl samples the tokens, scores nothing, and trains; Steno runs the agents, records what was sampled, and gives verl rows of it.
How to use it: docs/verl.md. `seam.py` has all that is asked of verl and of TransferQueue. This package needs neither torch nor
verl until its modules are imported.
"""

from importlib.metadata import PackageNotFoundError, version

VERL_VERSIONS = ("0.9.1",)
"""Releases that this was run with: the seams are not public, and change."""
TRANSFER_QUEUE_VERSIONS = ("0.1.10",)


def check_versions() -> None:
    """Raises: ImportError: verl or TransferQueue is not there, or is one that this was not run with."""
    for name, known in (("verl", VERL_VERSIONS), ("TransferQueue", TRANSFER_QUEUE_VERSIONS)):
        try:
            found = version(name)
        except PackageNotFoundError:
            raise ImportError(f"steno_adapters.verl needs {name} {known[0]}: none is installed") from None
        if found not in known:
            raise ImportError(
                f"{name}: got {found}, must be {' or '.join(known)}: steno_adapters.verl was run with that"
            )
