"""What the task FORK does after its agent: a conversation that goes on in two ways; an answer that is hung up on halfway."""

from __future__ import annotations

import os
from typing import Any

import openai

with openai.OpenAI(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], max_retries=8
) as client:

    def ask(*messages: Any) -> str:
        said = client.chat.completions.create(model="policy", messages=list(messages), temperature=0.1, max_tokens=32)
        return said.choices[0].message.content or ""

    first = {"role": "user", "content": "Name a number."}
    reply = {"role": "assistant", "content": ask(first)}
    ask(first, reply, {"role": "user", "content": "And another one."})
    ask(first, reply, {"role": "user", "content": "Twice that."})
    hasty: Any = {"role": "user", "content": "Never mind."}
    with client.chat.completions.create(model="policy", messages=[hasty], max_tokens=32, stream=True) as chunks:
        next(chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content)
