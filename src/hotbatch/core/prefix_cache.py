"""Finds KV blocks by the tokens they were computed from.

The key of a full block is a BLAKE2b hash of its token ids and of the key of the block before
it, so one key stands for the whole prefix; the first key also covers the request's
`cache_salt`. At 256 bits no two prefixes will ever share a key, by accident or on purpose,
and a hit needs no comparison of tokens. The idea of a hash chain over full blocks is vLLM's
(docs.vllm.ai, "Automatic Prefix Caching").

A key is entered when the step that filled the block is committed, for generated tokens as
well as for prompts. If two requests computed the same content at the same time, the first to
commit is indexed; the other block simply becomes free when released.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from hotbatch.core.request import Request

_KEY_BYTES = 32


def extend_block_keys(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The keys of the first `num_blocks` full blocks; computes only those still missing."""
    keys = request.block_keys
    while len(keys) < num_blocks:
        start = len(keys) * block_size
        tokens = array("q", request.tokens[start : start + block_size])
        previous = keys[-1] if keys else _root_key(request.cache_salt)
        keys.append(blake2b(previous + tokens.tobytes(), digest_size=_KEY_BYTES).digest())
    return keys


def _root_key(cache_salt: str | None) -> bytes:
    if cache_salt is None:
        return bytes(_KEY_BYTES)
    # Personalised, so that no salt can be made to look like the content of a block.
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=_KEY_BYTES, person=b"cache_salt").digest()


class PrefixCache:
    """A two-way map of content keys and blocks."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def blocks(self) -> set[int]:
        return set(self._key_of)

    def match(self, request: Request) -> list[int]:
        """The longest run of known blocks that holds the beginning of the request's tokens."""
        block_of = self._block_of
        if not block_of:
            return []
        size = self.block_size
        blocks: list[int] = []
        for index in range(len(request.tokens) // size):
            block = block_of.get(extend_block_keys(request, index + 1, size)[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def run_of(self, keys: Sequence[bytes]) -> list[int]:
        """The blocks of the first keys in a row that are known."""
        blocks: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: bytes) -> int | None:
        return self._block_of.get(key)

    def enter(self, key: bytes, block: int) -> bool:
        """Make a block findable; False if its content is already indexed elsewhere."""
        if key in self._block_of:
            return False
        assert block not in self._key_of, f"block {block} changed its content while indexed"
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def forget(self, block: int) -> None:
        """Drop a block that is about to get new content."""
        del self._block_of[self._key_of.pop(block)]

    def check_integrity(self) -> None:
        assert len(self._block_of) == len(self._key_of), "the two maps differ in size"
        for key, block in self._block_of.items():
            assert self._key_of[block] == key, f"block {block} is indexed under two keys"
