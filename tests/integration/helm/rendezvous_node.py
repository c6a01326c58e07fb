"""A node's torchrun, as far as nodes meet: `python -m tests.integration.helm.rendezvous_node PORT ADDRESS IS_HOST`, with the
variables of a pod. Meets once for each line of stdin; prints the number of the node and where the first rank is to be found."""

from __future__ import annotations

import os
import sys

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.rendezvous import RendezvousParameters


def main(port: str, address: str, is_host: str) -> None:
    conf = dict(pair.split("=") for pair in os.environ["PET_RDZV_CONF"].split(","))
    nodes = int(os.environ["PET_NNODES"])
    parameters = RendezvousParameters(
        os.environ["PET_RDZV_BACKEND"], f"127.0.0.1:{port}", os.environ["PET_RDZV_ID"], nodes, nodes, address,
        is_host=is_host, **conf,
    )  # fmt: skip
    handler = rendezvous.get_rendezvous_handler(parameters)
    for _ in sys.stdin:
        found = handler.next_rendezvous()
        print(found.rank, found.bootstrap_store_info.master_port, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
