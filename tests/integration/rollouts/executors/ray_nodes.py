"""A Ray cluster on this machine, in a process of its own. Each line of its input is `add` or `kill`, as JSON: a node's arguments,
or its id. It answers with a line: the cluster's address, its folder, the node's id, the dashboard. When its input ends, so does
the cluster.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.programs.ray_start import patient_start


def main() -> None:
    from ray.cluster_utils import Cluster

    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    patient_start()
    cluster, nodes = Cluster(), {}
    try:
        for line in sys.stdin:
            word, what = json.loads(line)
            if word == "add":
                node = cluster.add_node(object_store_memory=80 * 2**20, **what)
                nodes[node.node_id] = node
                found = node.node_id
            else:
                found = what
                _kill(nodes.pop(what))
            head = cluster.head_node
            print(
                json.dumps([cluster.address, head.get_session_dir_path(), found, head.webui_url]),
                file=answers,
                flush=True,
            )
    finally:
        cluster.shutdown()


def _kill(node: Any) -> None:
    """Its raylet, by SIGKILL. It is waited for: its workers take one that is a zombie for alive."""
    (raylet,) = node.all_processes["raylet"]
    raylet.process.kill()
    raylet.process.wait()


if __name__ == "__main__":
    main()
