#!/usr/bin/env bash
# A worker per GPU of this node. PROXY: http://TRAINER-NODE:8000. Ends them all with itself.
set -euo pipefail
: "${PROXY:?http://TRAINER-NODE:8000}" "${STENO_WORKER_KEY:?as on the trainer node}"
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
for gpu in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
  CUDA_VISIBLE_DEVICES=$gpu steno worker --proxy "$PROXY" --worker-id "$(hostname)-$gpu" --engine vllm \
    --model "${MODEL:-Qwen/Qwen2.5-3B-Instruct}" --context-tokens 32768 --max-streams 128 \
    -- --tool-call-parser hermes --enable-auto-tool-choice --max-num-seqs 128 &
done
wait -n
