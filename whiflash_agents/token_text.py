"""The text of a run of tokens, and where in it each token begins.

Needed to say which tokens a region of the text covers: a marker may begin in the middle of a token,
and one character may be spread over several. Linear in the number of tokens.
"""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_REPLACEMENT = "\ufffd"  # what decoding gives for bytes that are not (yet) a character
_PENDING_TOKENS = 4  # a character is at most four bytes, so no more tokens than that wait for one


@dataclass(frozen=True, slots=True)
class TokenText:
    """`starts[i]` is the number of characters complete before token i; non-decreasing."""

    text: str
    starts: list[int]

    def token_at(self, character: int) -> int:
        """The token in which the character `text[character]` begins."""
        first = bisect_left(self.starts, character)
        if first < len(self.starts) and self.starts[first] == character:
            return first
        return first - 1

    def token_after(self, character: int) -> int:
        """The token after the one that completes the character `text[character]`."""
        return bisect_right(self.starts, character)


class TokenTexts:
    """Decodes for one tokenizer; special tokens are kept as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else None

    def decode(self, token_ids: Sequence[int]) -> TokenText:
        if self._alphabet is not None:
            return self._decode_bytes(token_ids)
        return self._decode_windows(token_ids)

    def _decode_bytes(self, token_ids: Sequence[int]) -> TokenText:
        """Byte-level vocabularies: each token is a string of bytes, so places are exact."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, starts, length = [], [], 0
        for token_id in token_ids:
            starts.append(length)
            piece = decoder.decode(self._token_bytes(token_id))
            pieces.append(piece)
            length += len(piece)
        pieces.append(decoder.decode(b"", final=True))
        return TokenText("".join(pieces), starts)

    def _token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            # None: the model's vocabulary is padded beyond the tokenizer's.
            token = self._tokenizer.convert_ids_to_tokens(int(token_id)) or ""
            known = self._bytes[token_id] = self._to_bytes(token)
        return known

    def _to_bytes(self, token: str) -> bytes:
        alphabet = self._alphabet or {}
        try:
            return bytes(alphabet[character] for character in token)
        except KeyError:  # an added token, stored as plain text
            return token.encode("utf-8")

    def _decode_windows(self, token_ids: Sequence[int]) -> TokenText:
        """Other vocabularies: decode a growing window until it ends in a whole character. The text
        before it is kept in the window, because a token's leading space depends on it."""
        ids = list(token_ids)
        starts, length = [], 0
        begin, read, shown = 0, 0, ""
        for index in range(len(ids)):
            starts.append(length)
            text = self._text(ids[begin : index + 1])
            if text.endswith(_REPLACEMENT) and index - read < _PENDING_TOKENS:
                continue
            length += max(0, len(text) - len(shown))
            begin, read = read, index + 1
            shown = self._text(ids[begin:read])
        text = self._text(ids)
        return TokenText(text, [min(start, len(text)) for start in starts])

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def _is_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: those that are printable stand for
    themselves, the others are numbered from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}
