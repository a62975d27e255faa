"""A tokenizer for made-up models, whose weights are random and whose vocabulary means nothing.

The first 256 tokens are the bytes, so any text can be encoded, a token a byte; every other
id reads as a word of its own (" t300"), so that an answer shows which tokens came and each one
of them reaches a client as text.
"""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from hotbatch.text.tokenizer import Tokenizer

_NUM_BYTES = 256
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly `vocab_size` tokens and no special ones.

    Raises:
        ValueError: fewer than 256, the number of bytes.
    """
    if vocab_size < _NUM_BYTES:
        raise ValueError(f"a made-up vocabulary needs at least {_NUM_BYTES} tokens")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # how the byte-level alphabet writes a space
    spellings = alphabet + [f"{space}t{token}" for token in range(_NUM_BYTES, vocab_size)]
    backend = tokenizers.Tokenizer(
        models.BPE({spelling: token for token, spelling in enumerate(spellings)}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_template=_TEMPLATE)
