#!/usr/bin/env bash
# The same tasks and agent, trained by verl on this node's 8 GPUs: docs/verl.md. Words after the script's name go to verl:
#   ./verl-node.sh actor_rollout_ref.rollout.n=4 +steno.in_flight=16
# Needs verl 0.9.1 with vLLM, and beside it Steno (pip install --no-deps, and what its extra `proxy` asks for); mini on the PATH.
# With PROXY_SERVER_URL a proxy of yours records; else one is started in the job, and ends with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
steno tasks parquet tasks train.parquet
steno tasks parquet eval-tasks eval.parquet
mapfile -t overrides <verl-overrides.txt
exec python -m verl.trainer.main_ppo "${overrides[@]}" "$@"
