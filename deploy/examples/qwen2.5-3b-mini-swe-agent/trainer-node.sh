#!/usr/bin/env bash
# Redis, the proxy, the trainer on this node's GPUs, and the rollouts. Ends with the trainer: after total_steps, or once rollouts are
# over and their last groups are trained. Ctrl-C ends all in order, with a checkpoint; started again, it goes on.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${STENO_ADMIN_KEY:?a long random string}" "${STENO_WORKER_KEY:?another one}"
for program in curl redis-server steno; do
  if ! command -v "$program" >/dev/null; then
    echo "trainer-node.sh: $program is not installed" >&2
    exit 1
  fi
done
data=${DATA:-$PWD/steno-data}
mkdir -p "$data/redis"
data=$(realpath "$data")
# Copies on their way to the proxy: a local disk, since training stands still for them, and a folder of this $data: it is one run's.
weights=${WEIGHTS:-${TMPDIR:-/tmp}/steno-weights-$(printf %s "$data" | sha256sum | cut -c1-12)}
sockets=''
end() {  # told once more, it gives less time to what it still does
  trap 'kill "$1" 2>/dev/null || true' HUP INT TERM
  kill "$1" 2>/dev/null || true
  while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
}
finish() {  # the trainer makes its last step and checkpoint: it needs the proxy, which needs Redis
  trap - EXIT
  local part parts=''
  for part in $(jobs -pr); do parts="$part $parts"; done  # the last one that was started is the first one that ends
  for part in $parts; do end "$part"; done
  [ -z "$sockets" ] || rm -rf "$sockets"
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
# Each part is started by setsid: a terminal's Ctrl-C goes to this script alone, which ends them in their order.
# On a socket of its own: another Redis of this machine may have the port, and would keep its records elsewhere. Not in $data, which may
# be longer than the 107 bytes that a socket's path may have.
sockets=$(mktemp -d /tmp/steno-redis-XXXXXX)
setsid redis-server --port 0 --unixsocket "$sockets/socket" --dir "$data/redis" --appendonly yes --appendfsync everysec &
redis=$!
until [ -e "$sockets/socket" ]; do sleep 0.1; kill -0 "$redis" || exit 1; done
url=http://127.0.0.1:8000
if curl --noproxy '*' -s --max-time 5 "$url" >/dev/null; then  # trainer and rollouts would take that one
  echo "trainer-node.sh: port 8000 answers already: end what listens there (another proxy?)" >&2
  exit 1
fi
# The archive of a Redis is named by its address, if it is not given; the socket's path is another one at each start.
setsid steno proxy --host 0.0.0.0 --port 8000 --redis-url "unix://$sockets/socket" --keys-dir "$data/keys" \
  --archive "$data/archive" &
proxy=$!
until curl --noproxy '*' -sf --max-time 5 "$url/readyz" >/dev/null; do sleep 1; kill -0 "$proxy" && kill -0 "$redis" || exit 1; done
cd "$here"
setsid python -m steno_cli.torchrun --standalone --shutdown-timeout 600 --nproc-per-node "${GPUS:-8}" \
  -m steno train --config train.yaml --checkpoint-dir "$data/checkpoints" \
  --weights-dir "$weights" --metrics-file "$data/metrics.jsonl" --tensorboard-dir "$data/tensorboard" &
trainer=$!
setsid steno rollout --config rollout.yaml --results "$data/results.jsonl" --work-dir "$data/trials" &
rollouts=$!
code=0
wait -n -p ended "$trainer" "$rollouts" "$proxy" "$redis" || code=$?
if [ "$ended" = "$rollouts" ] && [ "$code" = 0 ]; then  # rollouts are over: the trainer takes what is left, and ends
  wait -n -p ended "$trainer" "$proxy" "$redis" || code=$?
fi
case $ended in  # trainer and rollouts would wait for it
  "$proxy") echo "trainer-node.sh: the proxy has ended (exit code $code)" >&2; exit 1 ;;
  "$redis") echo "trainer-node.sh: redis-server has ended (exit code $code)" >&2; exit 1 ;;
esac
exit "$code"
