"""`POST /{trial_id}/v1/responses/compact`: a conversation made short, so that it can go on in less context.

The model makes it short: it is asked for a summary, after the conversation as it stands, and what it says is a turn like any
other, on record and of the policy. The summary comes back sealed, as an item of type `compaction`, which stands for all that came
before it when it is sent again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from steno.contracts.chat import CanonicalRequest
from steno.contracts.errors import BadRequest, EngineFailed
from steno_proxy.dialects.base import Choice, Header, decode
from steno_proxy.dialects.openai.common import to_json
from steno_proxy.dialects.responses.dialect import Responses, canonical, decoder
from steno_proxy.dialects.responses.items import seal
from steno_proxy.dialects.responses.output import usage
from steno_proxy.dialects.responses.schema import COMPACT

ASK = (
    "This conversation is about to be cut off here, and will go on from your next message alone. Write down all that is needed "
    "to go on: what was asked for, what has been done and found out, with names, paths and numbers, what was decided, and what "
    "is left to do. Call no tools, and answer with that summary only."
)


class ResponsesCompact(Responses):
    """The dialect. Never streamed, never stored, without tools."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/responses/compact",)

    def parse(self, body: bytes) -> CanonicalRequest:
        asked = decode(decoder, body)
        if not asked.model:
            raise BadRequest("model is required", field="model")
        asked.stream, asked.store = False, False
        asked.tools = asked.tool_choice = asked.text = None
        return canonical(asked, last={"role": "user", "content": ASK})

    def answer(self, request: CanonicalRequest, header: Header, choices: Sequence[Choice]) -> bytes:
        summary = choices[0].message["content"]
        if not summary.strip():
            raise EngineFailed("the model gave no summary of the conversation")
        item = {"id": f"cmp_{header.answer_id}_0", "type": "compaction", "encrypted_content": seal(summary)}
        return to_json(
            {
                "id": f"resp_{header.answer_id}",
                "object": "response.compaction",
                "created_at": header.created,
                "output": [item],
                "usage": usage(choices[0]),
            }
        )

    def openapi(self) -> dict[str, Any]:
        return COMPACT
