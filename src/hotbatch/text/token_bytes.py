"""The bytes a token stands for, so that text can be put together token by token.

Two families cover nearly every language model: byte-level BPE, where each character of a
token's string is one byte in disguise, and SentencePiece BPE with byte fallback, where a
token is text with U+2581 for the space, or one byte written `<0xE2>`. In both the text of a
sequence is its tokens' bytes joined and read as UTF-8, which is what makes decoding
incremental at a constant cost per token. Other decoders (WordPiece and the like) have no
such table; `token_bytes_of` returns None for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map of printable characters to bytes: a byte which is printable stands for
    itself, the others take the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + offset): byte for offset, byte in enumerate(shifted)})
    return alphabet


_ALPHABET = byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:  # an added token, which is written in plain text
        return token.encode("utf-8")


def _byte_fallback(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8")


class TokenBytes:
    """A table from token id to bytes, filled as ids are met; safe to share among threads.

    `strips_first_space`: text that starts a sequence loses one leading space, which the
    tokenizer had put there.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        convert: Callable[[str], bytes],
        *,
        strips_first_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._convert = convert
        self._known: dict[int, bytes] = {}
        self.strips_first_space = strips_first_space

    def __getitem__(self, token_id: int) -> bytes:
        """The bytes of a token; an id outside of the vocabulary has none."""
        known = self._known.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = b"" if token is None else self._convert(token)
            self._known[token_id] = known
        return known


def token_bytes_of(tokenizer: tokenizers.Tokenizer) -> TokenBytes | None:
    """The table for a tokenizer whose decoder joins bytes, or None for other decoders."""
    if tokenizer.decoder is None:
        return None
    spec = json.loads(tokenizer.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(tokenizer, _byte_level)
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = [step for step in steps if step["type"] == "Replace"]
        plain = all(
            step["pattern"] == {"String": "\u2581"} and step["content"] == " " for step in replaced
        )
        strips = [step for step in steps if step["type"] == "Strip"]
        known_strip = all((step["content"], step["stop"]) == (" ", 0) for step in strips)
        if plain and known_strip:
            first = bool(strips) and strips[0]["start"] > 0
            return TokenBytes(tokenizer, _byte_fallback, strips_first_space=first)
    return None
