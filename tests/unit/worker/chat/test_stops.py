"""Stop strings: any cutting of the text gives the same end, and nothing before it is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from steno_worker.chat.stops import StopMatcher

ab = st.text("ab", max_size=24)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


@given(st.lists(st.text("ab", max_size=4), max_size=3), st.lists(ab))
def test_any_cutting_same_end(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, stop = run(stops, pieces)
    assert (shown, stop) == run(stops, list(text)) == run(stops, [text])
    wanted = [word for word in stops if word]
    if stop is None:
        assert shown == text and not any(word in text for word in wanted)
    else:
        assert text.startswith(shown + stop)
        assert not any(word in (shown + stop)[:-1] for word in wanted)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser:", "END"])
    assert matcher.feed("Hello\n").text == "Hello"
    assert matcher.feed("there E").text == "\nthere "
    assert matcher.feed("Nd").text == "ENd"
    assert matcher.feed("!\n\nUse").text == "!"
    assert matcher.feed("r: x") == ("", "\n\nUser:")


def test_multibyte_and_overlapping_stops() -> None:
    assert run(["天気"], ["東京の天", "気は"]) == ("東京の", "天気")
    assert run(["aab", "ab"], ["a", "a", "b"]) == ("", "aab")


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(ab))
def test_a_stop_that_is_shown_ends_the_text_after_it(stops: list[str], pieces: list[str]) -> None:
    """vLLM's `include_stop_str_in_output`."""
    hidden, stop = run(stops, pieces)
    matcher = StopMatcher(stops, shown=True)
    shown = ""
    for piece in pieces:
        text, found = matcher.feed(piece)
        shown += text
        if found is not None:
            assert (shown, found) == (hidden + found, stop)
            return
    assert stop is None and shown + matcher.flush() == hidden
