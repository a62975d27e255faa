"""Text from tokens as they come, never half a character.

Where the tokenizer has a byte table, the text is its tokens' bytes run through an
incremental UTF-8 decoder: constant cost a token, and a character appears with its last
byte. Bytes that can no longer become a character turn into U+FFFD, as when decoding at once.

For other decoders, whose text for a token depends on its neighbours, a short window is
decoded twice, without and with the new tokens, and the difference is the new text (the
method of Hugging Face's text-generation-inference). The window moves on whenever the text
is whole, and at the latest after `_MAX_HELD` tokens, so the cost stays bounded there too.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbatch.text.token_bytes import TokenBytes
    from hotbatch.text.tokenizer import Tokenizer

_CONTEXT = 5  # tokens before the new ones, for decoders that look at their neighbours
_MAX_HELD = 16  # a character is at most four bytes: more held tokens than this are garbage
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one token sequence, fed piece by piece.

    `prefix_ids` are tokens that stand before the sequence (a prompt); their text is not
    emitted, but the sequence then continues it instead of starting a text of its own.
    The concatenation of everything returned does not depend on how the tokens were split
    among calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prefix_ids: Sequence[int] = (),
    ) -> None:
        table = tokenizer.token_bytes
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._method: _ByBytes | _ByWindow
        if table is not None:
            strip = table.strips_first_space and not prefix_ids
            self._method = _ByBytes(table, strip=strip)
        else:
            self._method = _ByWindow(tokenizer, prefix_ids[-_CONTEXT:], skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        skip = self._skip
        return self._method.push([token for token in token_ids if token not in skip])

    def flush(self) -> str:
        """What is still held at the end of the sequence (U+FFFD for an unfinished character)."""
        return self._method.flush()


class _ByBytes:
    def __init__(self, table: TokenBytes, *, strip: bool) -> None:
        self._table = table
        self._decoder = _Utf8Decoder("replace")
        self._strip = strip

    def push(self, token_ids: list[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            text = self._decoder.decode(table[token_ids[0]])
        else:
            text = self._decoder.decode(b"".join([table[token] for token in token_ids]))
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByWindow:
    def __init__(self, tokenizer: Tokenizer, prefix_ids: Sequence[int], skip: bool) -> None:
        self._decode = tokenizer.backend.decode
        self._skip = skip
        self._ids = list(prefix_ids)
        self._emitted_to = len(self._ids)  # tokens of the window whose text is out

    def push(self, token_ids: list[int]) -> str:
        # One by one, so that the text does not depend on how tokens were grouped.
        return "".join([self._push_one(token) for token in token_ids])

    def _push_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._pending()
        if not text:
            return ""
        if text.endswith("\ufffd") and len(self._ids) - self._emitted_to < _MAX_HELD:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        text = self._pending() if len(self._ids) > self._emitted_to else ""
        self._advance()
        return text

    def _pending(self) -> str:
        before = self._decode(self._ids[: self._emitted_to], skip_special_tokens=self._skip)
        return self._decode(self._ids, skip_special_tokens=self._skip)[len(before) :]

    def _advance(self) -> None:
        del self._ids[:-_CONTEXT]
        self._emitted_to = len(self._ids)
