"""Ray's own limits for a node to start are 30 s, some without a setting: here so long that a busy machine keeps them. Passing
waits for none of them."""

from __future__ import annotations

import os
import time
from typing import Any

START_S = 240


def patient_start() -> None:
    """For nodes that this process starts from here on. Raises: AttributeError, AssertionError: Ray has other names by now."""
    import ray._private.services as services
    from ray.cluster_utils import Cluster

    os.environ |= {
        "RAY_raylet_start_wait_time_s": str(START_S),
        "RAY_gcs_server_port_wait_time_s": str(START_S),
    }
    waits: Any = Cluster._wait_for_node
    assert len(waits.__defaults__) == 1, "its only default is the limit"
    waits.__defaults__ = (START_S,)
    asked = services.get_node

    def get_node(gcs_address: str, node_id: str) -> Any:
        """Raises: RuntimeError: GCS does not know the node, still. `Node` asks again for 30 s, by a limit of its own."""
        until = time.monotonic() + START_S
        while True:
            try:
                return asked(gcs_address, node_id)
            except RuntimeError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    services.get_node = get_node
