"""Texts and vocabularies that the tests of this folder share."""

from __future__ import annotations

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and then some more words follow it.",
    "Xin chào Việt Nam, hôm nay trời đẹp quá! Phở bò Hà Nội rất ngon.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, ☃ snow",
    "def f(x):\n    return x + 1  # 123 4567",
]


def sentencepiece_metadata() -> dict[str, object]:
    """GGUF keys of a SentencePiece tokenizer: bytes, characters, and pieces with scores."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    kinds = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(tokens)
    pieces = ["▁t", "he", "▁the", "an", "▁an", "in", "▁▁", "aa", "aaa", "▁a", "ing", "er", "▁th"]
    for rank, piece in enumerate(pieces):
        tokens.append(piece)
        kinds.append(1)
        scores.append(-float(rank))
    for rank, char in enumerate("▁abcdefghijklmnopqrstuvwxyzé"):
        tokens.append(char)
        kinds.append(1)
        scores.append(-1000.0 - rank)
    tokens.append("<tool>")
    kinds.append(4)
    scores.append(0.0)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
