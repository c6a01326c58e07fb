"""Images at rest: apart from their messages, each once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from steno_proxy.store.encoding.codec import FIRST_MESSAGE, encode_turn
from steno_proxy.store.encoding.images import apart, together
from tests.support.records.recordings import row, turn

CAT, DOG = "data:image/png;base64,Q0FU", "data:image/jpeg;base64,RE9H"


def image(**fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": fields}


parts = st.one_of(
    st.builds(lambda said: {"type": "text", "text": said}, st.text(max_size=5)),
    st.builds(lambda url: image(url=url), st.sampled_from([CAT, DOG, "https://example.com/cat.png"])),
    st.builds(lambda url: image(url=url, detail="high"), st.sampled_from([CAT, DOG])),
)
messages = st.builds(
    lambda content: {"role": "user", "content": content}, st.text(max_size=5) | st.lists(parts, max_size=4)
)


@given(st.lists(messages, max_size=5))
def test_what_is_taken_apart_comes_together_again(said: list[dict[str, Any]]) -> None:
    before = json.dumps(said)
    resting, images = apart(said)
    assert json.dumps(said) == before, "the request itself is not touched"
    assert len({digest for digest, _ in images}) == len(images) <= 2
    assert "base64" not in json.dumps(resting)
    assert together([*images, *resting]) == said


def test_a_turn_sends_an_image_with_the_texts_that_are_believed_to_be_there() -> None:
    """So that an open turn and the whole one do not both carry it to the store."""
    said = [{"role": "user", "content": [image(url=CAT), image(url=DOG), image(url=CAT)]}]
    one = turn(0, messages=said)
    encoded = encode_turn(one, row(one))
    assert encoded.shared_texts == FIRST_MESSAGE + 2
    assert [b"base64" in each.raw for each in encoded.texts] == [False, False, True, True, False, False]
