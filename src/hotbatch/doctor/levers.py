"""What to do about each loss, in the words of hotbatch's options; vLLM's are mostly the same."""

from __future__ import annotations

LEVERS = {
    "few_clients": (
        "Send more requests at the same time: raise the client's concurrency, let more users "
        "in, or add work of the batch class, which steps aside for the others."
    ),
    "kv_cache": (
        "Give the cache more memory (--kv-cache-memory-bytes), hold it coarser "
        "(--kv-cache-dtype int8), or let requests ask for less (max_tokens, --max-model-len)."
    ),
    "seats": "Let more requests run at a time: raise --max-num-seqs, or use continuous batching.",
    "host": (
        "Look for what else uses the CPU: tokenizing or other Python threads in this process, "
        "neighbours on the machine, too many --threads; then for a slow disk or log."
    ),
    "prompts": (
        "Let prompts share their beginnings, so that the prefix cache has them; shorten them; "
        "or move them to another replica. Smaller chunks (--max-num-batched-tokens) keep the "
        "tokens of others flowing, but save nothing."
    ),
    "speculation": "Turn speculation off, or guess fewer tokens at a time.",
    "kernels": (
        "No setting of the batch helps. Check that nobody else uses the machine and that "
        "--threads fits its cores; then other precisions (--precision), or faster hardware."
    ),
}
