"""Sampling, step by step, in plain torch: defines exactly which token every sampler must pick.

From the f32 logits of a row, in this order:

1. Log-probabilities, if asked for, come from the logits as they are: l - logsumexp(l).
2. logit_bias is added; banned tokens get -inf.
3. Penalties, in f32. Repetition r: a token of the prompt or the output has its logit divided by
   r if positive, else multiplied by r. Then, for tokens of the output alone, frequency * count
   and presence are subtracted.
4. temperature 0: the largest logit wins, the lowest id among equals. Else logits are divided
   by the temperature, in f32, and ordered from large to small, equal ones by ascending id.
5. top_k keeps the first k. Weights are exp(l - l_max) in f64. top_p keeps a token if the weights
   before it sum to less than top_p times the sum of those that top_k kept; min_p keeps
   tokens of a weight of at least min_p. The first token always stays.
6. One uniform number u in (0, 1) a row picks the first kept token at which the running sum of
   weights (f64, in that order) exceeds u times the sum of all kept.

u is (x0 + 0.5) / 2^32, x0 the first output word of Philox4x32-10 under the key (low, high 32
bits of the seed) for the counter (position, 0, 0, 0): a function of seed and position alone, so
that a token depends neither on its batch nor on the order of steps.

A row whose largest logit is not finite, or is NaN, yields NO_TOKEN. Ids beyond the vocabulary are
passed over. Sources: vLLM's sampler for the order of 1-5; Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3", for Philox.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TOKEN = -1
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Controls:
    """What shapes one row's choice. `prompt` and `output` are the tokens so far, needed with
    penalties only; `seed` is any 64-bit integer, `position` that of the token to be drawn."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    seed: int = 0
    position: int = 0


def sample(logits: Tensor, controls: Controls) -> int:
    """Draw a token from f32 logits [vocab] by the rules above; NO_TOKEN if none can be."""
    logits = adjusted(logits, controls)
    largest = logits.max()
    if not torch.isfinite(largest):
        return NO_TOKEN
    if controls.temperature == 0.0:
        return int((logits == largest).nonzero()[0])
    token_ids, weights = kept(logits / controls.temperature, controls)
    running = weights.cumsum(dim=0)
    threshold = philox_uniform(controls.seed, controls.position) * float(running[-1])
    # Rounding may leave no running sum above the threshold; then the last token is meant.
    index = min(int((running <= threshold).sum()), len(running) - 1)
    return int(token_ids[index])


def adjusted(logits: Tensor, controls: Controls) -> Tensor:
    """Steps 2 and 3: biases, bans and penalties, on a copy."""
    logits = logits.to(torch.float32).clone()
    vocab = len(logits)
    for token_id, bias in controls.logit_bias:
        if token_id < vocab:
            logits[token_id] += bias
    for token_id in controls.banned:
        if token_id < vocab:
            logits[token_id] = -torch.inf
    if controls.repetition_penalty != 1.0:
        seen = _known(controls.prompt + controls.output, vocab, logits.device)
        old = logits[seen]
        penalty = controls.repetition_penalty
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if controls.frequency_penalty != 0.0 or controls.presence_penalty != 0.0:
        counts = Counter(token for token in controls.output if token < vocab)
        said = _known(tuple(counts), vocab, logits.device)
        times = torch.tensor([counts[token] for token in said.tolist()], dtype=torch.float32)
        logits[said] -= controls.frequency_penalty * times.to(logits.device)
        logits[said] -= controls.presence_penalty
    return logits


def _known(token_ids: Sequence[int], vocab: int, device: torch.device) -> Tensor:
    known = sorted({token for token in token_ids if token < vocab})
    return torch.tensor(known, dtype=torch.long, device=device)


def kept(logits: Tensor, controls: Controls) -> tuple[Tensor, Tensor]:
    """Step 5, on logits already divided by the temperature: the ids that stay, likeliest
    first, and their weights (f64, 1 for the likeliest)."""
    ordered, token_ids = logits.sort(descending=True, stable=True)
    if controls.top_k > 0:
        ordered, token_ids = ordered[: controls.top_k], token_ids[: controls.top_k]
    weights = (ordered.double() - ordered[0].double()).exp()
    running = weights.cumsum(dim=0)
    stays = weights >= controls.min_p
    if controls.top_p < 1.0:
        stays &= running - weights < controls.top_p * running[-1]
    stays &= weights > 0.0
    stays[0] = True
    return token_ids[stays], weights[stays]


def logprobs_of(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Step 1 for logits [R, vocab] and one token a row, token_ids [R].

    Returns:
        logprobs f32 [R]; ranks [R], 1 for the likeliest, equal logits ranked by ascending id;
        top_ids [R, num_top] and top_logprobs f32 [R, num_top], best first.
    """
    logits = logits.to(torch.float32)
    normaliser = logits.double().logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, token_ids.long()[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)[None, :]
    ahead = (logits > chosen) | ((logits == chosen) & (ids < token_ids[:, None]))
    top_ids = _likeliest(logits, num_top)
    return (
        (chosen.double() - normaliser)[:, 0].float(),
        ahead.sum(dim=1) + 1,
        top_ids,
        (logits.gather(1, top_ids).double() - normaliser).float(),
    )


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits a row, equal ones by ascending id: int64 [R, count].
    One pass each, as sorting whole vocabularies takes longer than a small model's step."""
    left = logits.clone()
    picked = [torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)]
    for _ in range(min(count, logits.shape[1])):
        best = (left == left.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
        left.scatter_(1, best, -torch.inf)
        picked.append(best)
    return torch.cat(picked, dim=1)


def philox_uniform(seed: int, position: int) -> float:
    """A number in (0, 1) that is a function of the 64-bit seed and the position alone."""
    first_word = philox((position, 0, 0, 0), (seed & _MASK32, (seed >> 32) & _MASK32))[0]
    return (first_word + 0.5) * 2.0**-32


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with ten rounds, on 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (right >> 32) ^ c1 ^ k0,
            right & _MASK32,
            (left >> 32) ^ c3 ^ k1,
            left & _MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3
