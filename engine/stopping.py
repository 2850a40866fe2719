"""Where a sequence ends: EOS, stop tokens, stop strings and length, cut inside an accepted run.

A round may accept several tokens; `StopChecker.check` says how many of them belong to the output
and which text became safe to show. It looks at tokens one after another and at text one character
after another, so the outcome does not depend on how tokens came in rounds, nor text in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .errors import RequestError
from .request import FinishReason, SamplingParams

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\ufffd"  # what decoders put for bytes that are not, or not yet, a character
_PENDING_LIMIT = 48  # tokens without settled text after which some are forgotten
_PENDING_TAIL = 16  # how many of them stay; a character has at most 4 bytes
_OPEN_CHARACTERS = 4  # replacement characters at the end that may still be one real character


@dataclass(frozen=True, slots=True)
class StopOutcome:
    """What `StopChecker.check` found in the tokens of one round.

    Attributes:
        kept: how many of the tokens belong to the output; all of them unless it ended.
        finish_reason: None while the sequence goes on.
        stop_reason: the stop string or stop token id that ended it; None for EOS and length.
        text: text that became safe to show; None for requests without stop strings.
    """

    kept: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str | None = None


class StopChecker:
    """Finds the end of one sequence.

    - EOS (unless `ignore_eos`) and `stop_token_ids` are kept as the last token, but their text is
      not part of the text. A token that is both counts as EOS.
    - The token that completes a stop string is the last one kept; the text is cut before the stop
      string, or after it with `include_stop`. Of several stop strings the one that is complete
      first, character by character, wins; of several complete at the same character, the one that
      starts first (the longest).
    - A token is checked for all these before `max_tokens`.
    - Before `min_tokens`, stop tokens and stop strings are disregarded, and a stop string that was
      complete by then does not count later.

    Raises RequestError if the parameters have stop strings and there is no `decode`.
    """

    __slots__ = ("_ended", "_eos", "_generated", "_parts", "_stop_ids", "_watcher", "params")

    def __init__(
        self,
        params: SamplingParams,
        *,
        eos_token_ids: Sequence[int],
        decode: Decode | None,
    ) -> None:
        self.params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._generated = 0
        self._ended = False
        self._parts: list[str] = []  # text released so far
        self._watcher: _TextWatcher | None = None
        if params.stop:
            if decode is None:
                raise RequestError(
                    f"stop={list(params.stop)!r} needs text, but there is no decode function: "
                    "give WhiFlashEngine(decode=tokenizer.decode), or use stop_token_ids"
                )
            self._watcher = _TextWatcher(
                _Detokenizer(decode), _StopStrings(params.stop, include=params.include_stop)
            )

    @property
    def text(self) -> str | None:
        """All text released so far: the final text once ended; None without stop strings."""
        if self._watcher is None:
            return None
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def check(self, tokens: Sequence[int]) -> StopOutcome:
        """Takes the tokens accepted in one round. Not to be called after the end."""
        if self._ended:
            raise RuntimeError("StopChecker.check was called after the sequence ended")
        start = len(self._parts)
        kept = 0
        finish: FinishReason | None = None
        reason: int | str | None = None
        for token in tokens:
            kept += 1
            self._generated += 1
            finish, reason = self._take(token)
            if finish is not None:
                self._ended = True
                break
        return StopOutcome(kept, finish, reason, self._released_since(start))

    def close(self) -> str | None:
        """Ends a sequence from outside (abort, error) and returns the text that was held back."""
        start = len(self._parts)
        if not self._ended:
            self._ended = True
            self._watch(None)
        return self._released_since(start)

    def _take(self, token: int) -> tuple[FinishReason | None, int | str | None]:
        may_stop = self._generated > self.params.min_tokens
        if may_stop and (token in self._eos or token in self._stop_ids):
            return "stop", self._watch(None) or (None if token in self._eos else token)
        at_limit = self._generated >= self.params.max_tokens
        found = self._watch(token)
        if found is None and at_limit:
            found = self._watch(None)
        if found is not None:
            return "stop", found
        return ("length", None) if at_limit else (None, None)

    def _watch(self, token: int | None) -> str | None:
        """Releases the text that `token` makes safe, or all that is left (None: the end).

        Returns the stop string that is complete with it.
        """
        if self._watcher is None:
            return None
        may_stop = self._generated >= self.params.min_tokens
        safe, found = self._watcher.feed(token, may_stop=may_stop)
        self._parts.append(safe)
        return found

    def _released_since(self, start: int) -> str | None:
        return None if self._watcher is None else "".join(self._parts[start:])


class _TextWatcher:
    """Tokens in, safe text and stop strings out."""

    __slots__ = ("_detokenizer", "_stops")

    def __init__(self, detokenizer: _Detokenizer, stops: _StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def feed(self, token: int | None, *, may_stop: bool) -> tuple[str, str | None]:
        """Returns the text that is safe with `token` (None: at the end), and the stop string that
        is complete with it, if one is."""
        if token is not None:
            return self._stops.feed(self._detokenizer.add(token), may_stop=may_stop)
        safe, found = self._stops.feed(self._detokenizer.flush(), may_stop=may_stop)
        return (safe if found else safe + self._stops.flush()), found


class _StopStrings:
    """Finds stop strings in a stream of characters, and holds back what may become one.

    One Knuth-Morris-Pratt automaton per string: linear time, and overlaps ("aab" in "aaab") need
    no second look.
    """

    __slots__ = ("_fallbacks", "_held", "_include", "_matched", "_strings")

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        self._strings = list(dict.fromkeys(strings))
        self._fallbacks = [_fallback_table(string) for string in self._strings]
        self._matched = [0] * len(self._strings)  # characters of each that the text now ends with
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool) -> tuple[str, str | None]:
        """Returns the text that is safe now, and the stop string that ended it, if one did."""
        for index, character in enumerate(text):
            complete = self._advance(character)
            if complete and may_stop:
                stop = max(complete, key=len)
                seen = self._held + text[: index + 1]
                self._held = ""
                return (seen if self._include else seen[: len(seen) - len(stop)]), stop
        seen = self._held + text
        # With include_stop the beginning of a stop string is shown whatever becomes of it.
        keep = 0 if self._include else max(self._matched)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> list[str]:
        """Moves every automaton by one character; returns the strings that are complete with it."""
        complete = []
        for which, string in enumerate(self._strings):
            fallback = self._fallbacks[which]
            length = self._matched[which]
            while length and string[length] != character:
                length = fallback[length]
            if string[length] == character:
                length += 1
            if length == len(string):
                complete.append(string)
                length = fallback[length]
            self._matched[which] = length
        return complete


def _fallback_table(string: str) -> list[int]:
    """Entry n: of the first n characters, how many at the end are also a beginning of `string`
    (not counting all n)."""
    table = [0] * (len(string) + 1)
    length = 0
    for index in range(1, len(string)):
        while length and string[index] != string[length]:
            length = table[length]
        if string[index] == string[length]:
            length += 1
        table[index + 1] = length
    return table


class _Detokenizer:
    """Turns tokens into text one at a time, at a cost that does not grow with the length.

    Decodes a window: the tokens whose text settled last, for decoders that treat the first token of
    a text differently (dropped leading space), and the tokens since. Replacement characters at its
    end wait, because they may be the first bytes of a character that the next tokens complete.
    """

    __slots__ = ("_decode", "_emitted", "_pending", "_text", "_window")

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._pending = 0  # tokens at the end of the window since text settled
        self._text = ""  # the decoded window
        self._emitted = 0  # characters of it that are out

    def add(self, token: int) -> str:
        """Returns the text that is certain with this token; often "" inside a character."""
        self._window.append(token)
        self._pending += 1
        self._text = self._decode(self._window)
        certain = len(self._text.rstrip(_REPLACEMENT))
        delta = self._emit(certain)
        if delta and certain == len(self._text):
            self._window = self._window[-self._pending :]
            self._pending = 0
            self._text = self._decode(self._window)
            self._emitted = len(self._text)
        elif self._pending > _PENDING_LIMIT:
            delta += self._shorten()
        return delta

    def flush(self) -> str:
        """Returns what is left, at the end of the sequence."""
        return self._emit(len(self._text))

    def _emit(self, end: int) -> str:
        delta = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return delta

    def _shorten(self) -> str:
        """Bounds the window when text does not settle: bytes that are no text, tokens without text.

        Gives up the replacement characters that no further token can complete, and forgets the
        middle of the window, provided that what is not out yet still reads the same without it.
        """
        delta = self._emit(max(0, len(self._text) - _OPEN_CHARACTERS))
        rest = self._text[self._emitted :]
        settled = self._window[: -self._pending]
        window = settled + self._window[-_PENDING_TAIL:]
        text = self._decode(window)
        if text.endswith(rest):
            self._window, self._pending = window, _PENDING_TAIL
            self._text, self._emitted = text, len(text) - len(rest)
        return delta
