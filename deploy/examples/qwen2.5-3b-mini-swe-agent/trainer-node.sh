#!/usr/bin/env bash
# Redis, the proxy, the trainer on this node's GPUs, and the rollouts. Ends them all with itself; started again, it goes on.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${STENO_ADMIN_KEY:?a long random string}" "${STENO_WORKER_KEY:?another one}"
data=${DATA:-$PWD/steno-data}
mkdir -p "$data/redis"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
redis-server --port 6379 --bind 127.0.0.1 --dir "$data/redis" --appendonly yes --appendfsync everysec &
steno proxy --host 0.0.0.0 --port 8000 --redis-url redis://127.0.0.1:6379/0 --keys-dir "$data/keys" &
until curl -sf http://127.0.0.1:8000/readyz >/dev/null; do sleep 1; done
cd "$here"
torchrun --standalone --nproc-per-node "${GPUS:-8}" -m steno train --config train.yaml --checkpoint-dir "$data/checkpoints" \
  --weights-dir "$data/weights" --metrics-file "$data/metrics.jsonl" --tensorboard-dir "$data/tensorboard" &
steno rollout --config rollout.yaml --results "$data/results.jsonl" --work-dir "$data/trials"
