"""The parts of a message's content, texts and images, the same for every dialect.

An image is OpenAI's `image_url` part, its pixels inline as a `data:` URL or behind an `http(s)` one; Anthropic's and Google's
shapes become that. What is inline is checked and bounded here, since it goes to a worker, into a digest and on record. An image
behind a URL is fetched by whoever runs the model, never by the proxy. Audio, video and files are refused by each dialect.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass, field
from typing import Any

from steno.contracts.chat import Message
from steno.contracts.errors import BadRequest, BodyTooLarge
from steno_proxy.dialects.refusals import must_be

MAX_IMAGE_BYTES = 10 * 2**20
"""Of one image, as base64 has it unpacked. Providers take 5 to 20 MB; three of them fit into a request of the default bound."""
MAX_URL_CHARS = 4096
MAX_STRINGS = 40_000
"""Parts in a request, where a format takes bare strings as parts: `nodes.py` counts only objects and arrays as nodes."""
_DATA = re.compile(r"data:(image/[a-z0-9][a-z0-9.+-]{0,60});base64,", re.IGNORECASE)
_ALPHABET = (string.ascii_letters + string.digits + "+/").encode()
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text")
_DETAILS = ("auto", "low", "high", "original")

Part = dict[str, Any]


@dataclass(slots=True)
class SeenParts:
    """What was met in a request on the way to its messages.

    dropped: types of what was left out, one each. images: dotted paths of the images, in the client's words. texts: parts so far,
    where a format takes bare strings for them.
    """

    dropped: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    texts: int = 0

    def strings(self, path: str, given: list[Any]) -> None:
        """Of parts that are given as bare strings. Raises: BodyTooLarge: more than MAX_STRINGS in a request."""
        self.texts += len(given)
        if self.texts > MAX_STRINGS:
            raise BodyTooLarge(
                f"{path}: too many parts: {self.texts} so far, at most {MAX_STRINGS} in a request", field=path
            )

    def image(self, path: str, url: Any, detail: Any = None) -> Part:
        """The part for an image at `path`. Raises: BadRequest: as `image_part`."""
        part = image_part(path, url, detail)
        self.images.append(path)
        return part


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(path: str, url: Any, detail: Any = None) -> Part:
    """Args: path: of the field that holds the URL, for the error. detail: how closely to look, in OpenAI's words; None: not said.

    Raises: BadRequest: no URL of a kind that can be passed on, base64 that is none, too large.
    """
    if not isinstance(url, str) or not url:
        raise must_be("the URL of an image", path, url)
    if url[:5].lower() == "data:":
        _check_data(path, url)
    elif not url.lower().startswith(("https://", "http://")):
        raise must_be("a data:, https: or http: URL", path, url)
    elif len(url) > MAX_URL_CHARS:
        raise BadRequest(f"{path}: the URL is longer than {MAX_URL_CHARS} characters", field=path)
    shown: dict[str, Any] = {"url": url}
    if detail in _DETAILS and detail != "auto":
        shown["detail"] = detail
    return {"type": "image_url", "image_url": shown}


def data_url(path: str, media_type: Any, data: Any) -> str:
    """The URL for an image given as base64 and its type. Raises: BadRequest naming the one that is no string."""
    for name, value in (("media_type", media_type), ("data", data)):
        if not isinstance(value, str) or not value:
            raise BadRequest(f"{path}.{name} is required, as a string", field=f"{path}.{name}")
    return f"data:{media_type.lower()};base64,{data}"


def _check_data(path: str, url: str) -> None:
    head = _DATA.match(url)
    if head is None:
        raise BadRequest(f"{path}: a data: URL must be an image in base64 (data:image/png;base64,…)", field=path)
    if (len(url) - head.end()) * 3 // 4 > MAX_IMAGE_BYTES + 2:
        raise BadRequest(f"{path}: the image is larger than {MAX_IMAGE_BYTES} bytes", field=path)
    data = url[head.end() :]
    if not data:
        raise BadRequest(f"{path}: the image is empty", field=path)
    if not _is_base64(data):
        raise BadRequest(f"{path}: the image is not valid base64", field=path)


def _is_base64(data: str) -> bool:
    """As `binascii.a2b_base64` in its strict mode says, in a third of the time: tens of megabytes are looked at."""
    if not data.isascii() or len(data) % 4:
        return False
    others = data.encode().translate(None, _ALPHABET)
    return not others or (others in (b"=", b"==") and data.endswith(others.decode()))


def content_of(parts: list[Part]) -> str | list[Part]:
    """Canonical content: one text is itself, none is "" (agents flatten such lists when they echo them), the rest are parts."""
    if not parts:
        return ""
    only = parts[0]
    return only["text"] if len(parts) == 1 and only["type"] == "text" else parts


def says_nothing(parts: list[Part]) -> bool:
    """Whether there is no image and no text that is not empty."""
    return not any(part["type"] != "text" or part["text"] for part in parts)


def thought_of(path: str, part: Any) -> str | None:
    """The reasoning in a part of an assistant's message: `reasoning_text`, `thinking` as Mistral and Anthropic write it. None: a
    part of another type. Raises: BadRequest naming the field."""
    if not isinstance(part, dict) or part.get("type") not in _THOUGHTS:
        return None
    key = "thinking" if "thinking" in part else "text"
    given = part.get(key)
    if isinstance(given, list):
        given = "".join(one["text"] for one in given if isinstance(one, dict) and isinstance(one.get("text"), str))
    if not isinstance(given, str | None):
        raise must_be("a string or a list of text parts", f"{path}.{key}", given)
    return given or ""


def texts_of(message: Message) -> str:
    """The text of a message, all of it."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")
