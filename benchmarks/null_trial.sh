#!/bin/bash
# A trial that costs next to nothing: two turns of one conversation, by raw sockets. STENO_TASK_STARTED: a file that gets a line once the
# first turn has come. STENO_TASK_GATE: a named pipe; the second turn waits until somebody has opened it to write.
LC_ALL=C
base=${OPENAI_BASE_URL#http://}
host=${base%%/*}
first='{"role":"user","content":"go"}'

# ask MESSAGES: prints nothing, fails unless the answer is 200. As clients do, it asks again where it is told to come later.
ask() {
  local body="{\"model\":\"bench\",\"max_tokens\":1,\"messages\":[$1]}" status rest try
  for try in 1 2 3 4 5; do
    exec 3<>"/dev/tcp/${host%:*}/${host##*:}" || exit 7
    printf 'POST /%s/chat/completions HTTP/1.1\r\nhost: %s\r\nauthorization: Bearer %s\r\ncontent-type: application/json\r\ncontent-length: %s\r\nconnection: close\r\n\r\n%s' \
      "${base#*/}" "$host" "$OPENAI_API_KEY" "${#body}" "$body" >&3
    read -r rest status rest <&3
    while read -r rest; do :; done <&3
    exec 3>&-
    case $status in
      200) return ;;
      429 | 503) sleep "$try" ;;
      *) break ;;
    esac
  done
  echo "asked: got status $status" >&2
  exit 8
}

ask "$first"
if [ -n "$STENO_TASK_STARTED" ]; then echo >>"$STENO_TASK_STARTED"; fi
if [ -n "$STENO_TASK_GATE" ]; then : <"$STENO_TASK_GATE"; fi
ask "$first,{\"role\":\"assistant\",\"content\":\" tok\"},{\"role\":\"user\",\"content\":\"on\"}"
echo 1 >reward.txt
