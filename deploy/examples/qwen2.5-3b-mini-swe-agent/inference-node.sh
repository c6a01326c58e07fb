#!/usr/bin/env bash
# A worker per GPU of this node. PROXY: http://TRAINER-NODE:8000. Ends them all with itself; each says to the end what it is saying,
# unless Ctrl-C is pressed once more.
set -euo pipefail
: "${PROXY:?http://TRAINER-NODE:8000}" "${STENO_WORKER_KEY:?as on the trainer node}"
finish() {
  trap - EXIT
  trap 'kill $(jobs -p) 2>/dev/null || true' HUP INT TERM
  kill $(jobs -p) 2>/dev/null || true
  while [ -n "$(jobs -pr)" ]; do wait || true; done
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
for gpu in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
  # setsid: a terminal's Ctrl-C goes to this script alone, which tells each worker once.
  CUDA_VISIBLE_DEVICES=$gpu setsid steno worker --proxy "$PROXY" --worker-id "$(hostname)-$gpu" --engine vllm \
    --model "${MODEL:-Qwen/Qwen2.5-3B-Instruct}" --context-tokens 32768 --max-streams 128 \
    -- --tool-call-parser hermes --enable-auto-tool-choice --max-num-seqs 128 &
done
wait -n
