"""Two clients that attack nobody, for `benchmarks/attacks.py`: how long `/healthz` and the first token of another trial take.

    python -m benchmarks.attacks_bystander URL AGENT_AUTHORIZATION

Asks until a line comes on standard input, then prints JSON. The trial is `bystander`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter

import httpx

PAUSE_S = 0.02
TIMEOUT_S = 180.0
_ASK = {"model": "bench", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": "hello"}]}


def main() -> int:
    url, authorization = sys.argv[1:]
    over = threading.Event()
    healthz: list[float] = []
    first: list[float] = []
    statuses: Counter[str] = Counter()

    def ask_health() -> None:
        with httpx.Client(timeout=TIMEOUT_S) as client:
            while not over.wait(PAUSE_S):
                began = time.monotonic()
                client.get(url + "/healthz")
                healthz.append(time.monotonic() - began)

    def ask_tokens() -> None:
        with httpx.Client(timeout=TIMEOUT_S, headers={"authorization": authorization}) as client:
            while not over.wait(PAUSE_S):
                began, waited = time.monotonic(), 0.0
                with client.stream("POST", f"{url}/bystander/v1/chat/completions", json=_ASK) as answer:
                    for line in answer.iter_lines():
                        if " tok" in line:
                            waited = waited or time.monotonic() - began
                first.append(waited or time.monotonic() - began)
                statuses[str(answer.status_code)] += 1

    threads = [threading.Thread(target=ask_health), threading.Thread(target=ask_tokens)]
    for thread in threads:
        thread.start()
    while not (healthz and first):
        time.sleep(0.01)
    print("asking", flush=True)
    sys.stdin.readline()
    over.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"healthz_s": max(healthz), "first_token_s": max(first), "statuses": statuses}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
