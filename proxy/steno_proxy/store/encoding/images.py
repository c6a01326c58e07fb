"""Stores each image once per session, whichever messages contain it (I5).

A message rests without the pixels of its images, which are texts of their own, found again by digest like any text:

    {"type": "image_url", "image_url": {"digest": "<32 hex digits>"}}     in the message
    ["<32 hex digits>", "data:image/png;base64,…"]                       beside it: a list, where a message is an object

An image behind a URL stays as it is. What is read has every image in its place again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from steno.contracts.chat import Message
from steno_proxy.store.encoding.texts import DIGEST_BYTES

Image = list[str]


def apart(messages: Iterable[Message]) -> tuple[list[Message], list[Image]]:
    """The messages as they rest, and the images of all of them, each once. Those without images are the same objects."""
    images: dict[str, Image] = {}
    resting = [_apart(message, images) for message in messages]
    return resting, list(images.values())


def together(values: Iterable[Any]) -> list[Message]:
    """What rests of a turn's messages and its reply, with the images among it -> the messages and the reply."""
    messages, urls = [], {}
    for value in values:
        if isinstance(value, list):
            urls[value[0]] = value[1]
        else:
            messages.append(value)
    return [_together(message, urls) for message in messages] if urls else messages


def _apart(message: Message, images: dict[str, Image]) -> Message:
    content = message.get("content")
    if not isinstance(content, list) or not any(data_of(part) for part in content):
        return message
    parts = []
    for part in content:
        if url := data_of(part):
            digest = blake2b(url.encode(), digest_size=DIGEST_BYTES).hexdigest()
            images[digest] = [digest, url]
            rest = {key: value for key, value in part["image_url"].items() if key != "url"}
            part = {**part, "image_url": {"digest": digest, **rest}}
        parts.append(part)
    return {**message, "content": parts}


def _together(message: Message, urls: dict[str, str]) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_with_url(part, urls) for part in content]}


def _with_url(part: Any, urls: dict[str, str]) -> Any:
    image = part.get("image_url") if isinstance(part, dict) else None
    if not isinstance(image, dict) or "url" in image or image.get("digest") not in urls:
        return part
    rest = {key: value for key, value in image.items() if key != "digest"}
    return {**part, "image_url": {"url": urls[image["digest"]], **rest}}


def data_of(part: Any) -> str:
    """The `data:` URL of a part that has one, else ""."""
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    url = image.get("url") if isinstance(image, dict) else None
    return url if isinstance(url, str) and url[:5].lower() == "data:" else ""
