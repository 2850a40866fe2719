"""Stops inside accepted runs: independence of how tokens come in rounds, equality with a naive
reading of the whole text, and text that is streamed neither too early nor too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from whiflash_agents.engine.errors import RequestError
from whiflash_agents.engine.request import SamplingParams
from whiflash_agents.engine.stopping import StopChecker, StopOutcome

# Tokens of a byte-level vocabulary: letters, words, parts of characters (also the end of one and
# the beginning of the next), a byte that is never text, and special tokens without text.
PIECES = [
    b"",  # 0: EOS
    b"",  # 1: special
    b"a",
    b"b",
    b"aa",
    b"ab",
    b"aab",
    b" ",
    b"\n",
    b"</",
    b"think>",
    "é".encode(),
    "é".encode()[:1],
    "é".encode()[1:],
    "€".encode()[:2],
    "€".encode()[2:],
    "€".encode()[2:] + "€".encode()[:1],
    "😀".encode()[:1],
    "😀".encode()[1:3],
    "😀".encode()[3:],
    b"\xff",
    b"ba" + "€".encode()[:2],
]
EOS = 0
A, B, AA, AB, AAB = 2, 3, 4, 5, 6
STOPS = [
    "a",
    "b",
    "ab",
    "aab",
    "aba",
    "ba",
    "</think>",
    "\n\n",
    "é",
    "€a",
    "😀",
    "aaaa",
    "b é",
    "�b",
]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode("utf-8", errors="replace")


def checker(decode: Callable[[Sequence[int]], str] | None = decode, **options: Any) -> StopChecker:
    params = SamplingParams(**{"max_tokens": 100, **options})
    return StopChecker(params, eos_token_ids=[EOS], decode=decode)


@dataclass
class Ending:
    """Where a stream of tokens ends, and with what text."""

    kept: int
    finish_reason: str | None
    stop_reason: int | str | None
    text: str


def naive_ending(params: SamplingParams, tokens: Sequence[int]) -> Ending:
    """Reads the whole text again with every token and looks at every position of it."""
    arrival: list[int] = []  # per character, the number of the token that makes it certain

    def first_stop(text: str, count: int) -> tuple[str, str] | None:
        """The stop string that ends the text, and the text that is left."""
        arrival.extend([count] * (len(text) - len(arrival)))
        for end in range(1, len(text) + 1):
            complete = [stop for stop in params.stop if text[:end].endswith(stop)]
            if complete and arrival[end - 1] >= params.min_tokens:
                stop = max(complete, key=len)
                return stop, text[: end if params.include_stop else end - len(stop)]
        return None

    for count, token in enumerate(tokens, 1):
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        ends = ends and count > params.min_tokens
        shown = tokens[: count - 1] if ends else tokens[:count]
        last = ends or count == params.max_tokens
        text = decode(shown) if last else decode(shown).rstrip("�")
        found = first_stop(text, count)
        if found is not None:
            return Ending(count, "stop", *found)
        if ends:
            is_eos = token == EOS and not params.ignore_eos
            return Ending(count, "stop", None if is_eos else token, text)
        if last:
            return Ending(count, "length", None, text)
    text = decode(tokens)  # aborted here: what was held back, but no stop string
    found = first_stop(text, len(tokens))
    return Ending(len(tokens), None, None, found[1] if found else text)


def run(checker: StopChecker, tokens: Sequence[int], rounds: Sequence[int]) -> Ending:
    """Feeds `tokens` in rounds of the given sizes; the text is what was streamed."""
    start = 0
    streamed = ""
    kept = 0
    for size in [*rounds, len(tokens)]:
        part = tokens[start : start + size]
        if not part:
            continue
        outcome = checker.check(part)
        start += len(part)
        kept += outcome.kept
        streamed += outcome.text or ""
        if outcome.finish_reason is not None:
            assert checker.close() in ("", None)
            assert checker.text in (streamed, None)
            return Ending(kept, outcome.finish_reason, outcome.stop_reason, streamed)
        assert outcome.kept == len(part)
        assert outcome.stop_reason is None
    streamed += checker.close() or ""
    assert checker.text in (streamed, None)
    return Ending(kept, None, None, streamed)


token_lists = st.lists(
    st.one_of(st.integers(1, len(PIECES) - 1), st.sampled_from([A, B, AB]), st.just(EOS)),
    min_size=1,
    max_size=30,
)
round_sizes = st.lists(st.integers(1, 9), max_size=30)
params_strategy = st.builds(
    lambda max_tokens, min_tokens, **options: SamplingParams(
        max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens), **options
    ),
    max_tokens=st.sampled_from([1, 2, 5, 12, 40]),
    min_tokens=st.sampled_from([0, 0, 0, 1, 3, 8]),
    stop=st.lists(
        st.sampled_from(STOPS) | st.text("ab é€�", min_size=1, max_size=5), min_size=1
    ).map(tuple),
    stop_token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=2),
    include_stop=st.booleans(),
    ignore_eos=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(params=params_strategy, tokens=token_lists, rounds=round_sizes)
def test_any_split_into_rounds_ends_where_a_naive_reading_of_the_text_does(
    params: SamplingParams, tokens: list[int], rounds: list[int]
) -> None:
    wanted = naive_ending(params, tokens)
    for sizes in (rounds, [1] * len(tokens), []):
        fresh = StopChecker(params, eos_token_ids=[EOS], decode=decode)
        assert run(fresh, tokens, sizes) == wanted


@settings(max_examples=200, deadline=None)
@given(params=params_strategy, tokens=token_lists, rounds=round_sizes)
def test_without_stop_strings_tokens_alone_decide(
    params: SamplingParams, tokens: list[int], rounds: list[int]
) -> None:
    plain = SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    wanted = naive_ending(plain, tokens)
    got = run(StopChecker(plain, eos_token_ids=[EOS], decode=None), tokens, rounds)
    assert got == Ending(wanted.kept, wanted.finish_reason, wanted.stop_reason, "")


@settings(max_examples=300, deadline=None)
@given(tokens=token_lists, stops=st.lists(st.sampled_from(STOPS), min_size=1, max_size=3))
def test_text_is_released_as_soon_as_it_cannot_begin_a_stop_string(
    tokens: list[int], stops: list[str]
) -> None:
    subject = checker(stop=stops)
    released = ""
    for count, token in enumerate(tokens, 1):
        outcome = subject.check([token])
        released += outcome.text or ""
        if outcome.finish_reason is not None:
            break
        certain = decode(tokens[:count]).rstrip("�")
        held = max(
            length
            for length in range(len(certain) + 1)
            if any(stop.startswith(certain[len(certain) - length :]) for stop in stops)
        )
        assert released == certain[: len(certain) - held]


# --- the kinds of failure, one by one ------------------------------------------------------------


def test_eos_inside_an_accepted_run_cuts_the_rest_and_has_no_text() -> None:
    subject = checker(stop=["zz"])
    outcome = subject.check([A, B, EOS, A, A])
    assert outcome == StopOutcome(kept=3, finish_reason="stop", stop_reason=None, text="ab")
    assert subject.text == "ab"


def test_stop_token_inside_an_accepted_run_is_named() -> None:
    outcome = checker(stop_token_ids=[B]).check([A, B, A])
    assert outcome == StopOutcome(kept=2, finish_reason="stop", stop_reason=B, text=None)


def test_token_that_is_eos_and_stop_token_counts_as_eos_unless_eos_is_ignored() -> None:
    assert checker(stop_token_ids=[EOS]).check([EOS]).stop_reason is None
    ignoring = checker(stop_token_ids=[EOS], ignore_eos=True)
    assert ignoring.check([EOS]) == StopOutcome(1, "stop", EOS, None)


def test_ignored_eos_is_an_ordinary_token() -> None:
    outcome = checker(ignore_eos=True, max_tokens=3).check([EOS, A, EOS, A])
    assert outcome == StopOutcome(kept=3, finish_reason="length")


def test_stop_string_inside_accepted_run_ends_text_and_ids_together() -> None:
    outcome = checker(stop=["</think>"]).check([A, 9, 10, B, B])
    assert outcome == StopOutcome(3, "stop", "</think>", "a")
    outcome = checker(stop=["</think>"], include_stop=True).check([A, 9, 10, B, B])
    assert outcome == StopOutcome(3, "stop", "</think>", "a</think>")


def test_stop_string_that_begins_in_one_round_and_ends_in_another() -> None:
    subject = checker(stop=["</think>"])
    assert subject.check([A, 9]) == StopOutcome(2, text="a")  # "</" is held back
    assert subject.check([10, B]) == StopOutcome(1, "stop", "</think>", "")
    assert subject.text == "a"


def test_held_back_beginning_is_released_when_it_leads_nowhere() -> None:
    subject = checker(stop=["</think>"])
    assert subject.check([9]).text == ""
    assert subject.check([A]).text == "</a"


def test_beginning_of_a_stop_string_is_shown_at_once_if_the_stop_string_will_be() -> None:
    assert checker(stop=["</think>"], include_stop=True).check([9]).text == "</"


def test_stop_string_inside_one_token_cuts_inside_the_token() -> None:
    assert checker(stop=["hin"]).check([A, 9, 10]) == StopOutcome(3, "stop", "hin", "a</t")


@pytest.mark.parametrize("tokens", [[A, A, A, B], [AA, AB], [A, AAB], [AA, A, B]])
def test_overlapping_partial_matches_are_found(tokens: list[int]) -> None:
    outcome = checker(stop=["aab"]).check([*tokens, A])
    assert outcome == StopOutcome(len(tokens), "stop", "aab", "a")


@pytest.mark.parametrize("stops", [["b", "aab"], ["aab", "b"]])
@pytest.mark.parametrize("tokens", [[A, A, B], [AAB], [A, AB]])
def test_of_stop_strings_complete_at_once_the_longest_wins(
    stops: list[str], tokens: list[int]
) -> None:
    assert checker(stop=stops).check(tokens) == StopOutcome(len(tokens), "stop", "aab", "")


@pytest.mark.parametrize("stops", [["ba", "aa"], ["aa", "ba"]])
@pytest.mark.parametrize("tokens", [[AA, B, A], [A, AB, A], [AAB, A]])
def test_the_stop_string_complete_first_in_the_text_wins(
    stops: list[str], tokens: list[int]
) -> None:
    outcome = checker(stop=stops).check(tokens)
    assert (outcome.stop_reason, outcome.text) == ("aa", "")


def test_length_counts_tokens_not_rounds_and_a_stop_on_the_last_token_wins() -> None:
    subject = checker(max_tokens=4)
    assert subject.check([A, A, A]) == StopOutcome(3)
    assert subject.check([A, A]) == StopOutcome(1, "length")
    assert checker(max_tokens=3).check([A, A, EOS]) == StopOutcome(3, "stop")
    assert checker(max_tokens=2, stop=["b"]).check([A, B]) == StopOutcome(2, "stop", "b", "a")


def test_length_releases_what_was_held_back() -> None:
    assert checker(max_tokens=2, stop=["</think>"]).check([A, 9]).text == "a</"
    assert checker(max_tokens=2, stop=["zz"]).check([A, 12]).text == "a�"


def test_stop_string_before_min_tokens_is_disregarded_for_good() -> None:
    subject = checker(stop=["ab"], min_tokens=3)
    assert subject.check([AB, A]) == StopOutcome(2, text="ab")  # the second "a" may begin another
    assert subject.check([A]).finish_reason is None
    assert subject.check([B, A]) == StopOutcome(1, "stop", "ab", "")
    assert subject.text == "aba"


def test_stop_string_that_begins_before_min_tokens_and_ends_after_counts() -> None:
    outcome = checker(stop=["aab"], min_tokens=3).check([A, A, B])
    assert outcome == StopOutcome(3, "stop", "aab", "")


def test_disregarded_stop_string_may_share_characters_with_one_that_counts() -> None:
    outcome = checker(stop=["aba"], min_tokens=4).check([A, B, A, B, A])
    assert outcome == StopOutcome(5, "stop", "aba", "ab")


def test_stop_tokens_before_min_tokens_are_disregarded() -> None:
    subject = checker(stop_token_ids=[B], min_tokens=2)
    assert subject.check([B, EOS, B, A]) == StopOutcome(3, "stop", B)


def test_character_split_over_tokens_is_never_shown_in_parts() -> None:
    subject = checker(stop=["zz"])
    assert [subject.check([token]).text for token in (17, 18, 19)] == ["", "", "😀"]


def test_stop_string_made_of_a_split_character_is_found() -> None:
    assert checker(stop=["😀"]).check([A, 17, 18, 19, B]) == StopOutcome(4, "stop", "😀", "a")


def test_abort_releases_what_was_held_back_once() -> None:
    subject = checker(stop=["</think>"])
    subject.check([A, 9, 12])
    assert subject.close() == "</�"
    assert subject.close() == ""
    assert subject.text == "a</�"
    assert checker().close() is None


def test_check_after_the_end_is_a_mistake_of_the_caller() -> None:
    subject = checker()
    subject.check([EOS])
    with pytest.raises(RuntimeError, match="after the sequence ended"):
        subject.check([A])


def test_stop_strings_without_a_decode_function_are_refused() -> None:
    with pytest.raises(RequestError, match=r"stop=\['x'\] needs text.*stop_token_ids"):
        checker(None, stop=["x"])


# --- decoding ------------------------------------------------------------------------------------

METASPACE = ["▁", "▁▁", "▁Hello", "▁x", "lo", ",", "\n", "<0xE2>", "<0x82>", "<0xAC>", "<0x41>"]
SENTENCEPIECE = decoders.Sequence(
    [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)


def decode_sentencepiece(tokens: Sequence[int]) -> str:
    return SENTENCEPIECE.decode([METASPACE[token] for token in tokens if token < len(METASPACE)])


EURO = [7, 8, 9]
sentencepiece_text = st.lists(
    st.integers(0, 6).map(lambda token: [token]) | st.just(EURO) | st.just([10]) | st.just([99]),
    max_size=25,
).map(lambda groups: [token for group in groups for token in group])


@settings(max_examples=300, deadline=None)
@given(tokens=sentencepiece_text, rounds=round_sizes)
@example(tokens=[3, 0, 2], rounds=[])
@example(tokens=[3, 99, 2, 99, 99, 3], rounds=[])
@example(tokens=[0, 0, 2], rounds=[])
@example(tokens=[3, *[99] * 100, 2], rounds=[])
@example(tokens=[99, 2, *EURO, *EURO, 3], rounds=[])
def test_spaces_and_bytes_of_sentencepiece_tokenizers_survive_streaming(
    tokens: list[int], rounds: list[int]
) -> None:
    subject = checker(decode_sentencepiece, stop=["never"], ignore_eos=True, max_tokens=1000)
    assert run(subject, tokens, rounds).text == decode_sentencepiece(tokens)


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=80) | st.text(max_size=40).map(str.encode),
    noise=st.integers(0, 130),
    rounds=round_sizes,
)
def test_any_bytes_stream_to_the_text_of_all_of_them(
    data: bytes, noise: int, rounds: list[int]
) -> None:
    def decode_bytes(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    tokens = list(b"\xf0\x9f" * (noise // 2) + b"\xe2" * (noise % 2) + data)
    params = SamplingParams(max_tokens=1000, stop=["never"])
    subject = StopChecker(params, eos_token_ids=[], decode=decode_bytes)
    assert run(subject, tokens, rounds).text == decode_bytes(tokens)


@pytest.mark.parametrize(
    "kind",
    [
        [A, B, 7],
        [17, 18, 19],
        [16],  # the end of one character and the beginning of the next, for ever
        [20],  # bytes that are never text
        [1],  # no text at all
        [A, *[1] * 200],
        [A, *[20] * 200],
    ],
    ids=["words", "split characters", "misaligned", "no text", "empty", "rarely", "rarely valid"],
)
def test_cost_is_linear_in_the_length(kind: list[int]) -> None:
    longest = 0

    def decode_and_measure(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    tokens = (kind * 4000)[:4000]
    subject = checker(decode_and_measure, stop=["never"], max_tokens=4000)
    text = ""
    for start in range(0, 4000, 5):
        text += subject.check(tokens[start : start + 5]).text or ""
    assert text == decode(tokens)
    assert longest < 150
