"""An agent of these tests: one turn with the model, and what it answered."""

from __future__ import annotations

import json
import os
import urllib.request


def ask(text: str) -> str:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


if __name__ == "__main__":
    print(ask("hello"))
