"""Sampling, native against the reference: the same token, whatever the controls, on every
instruction set here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch

from hotbatch.kernels import _native
from hotbatch.kernels.sampling.reference import NO_TOKEN, Controls, logprobs_of
from hotbatch.kernels.sampling.reference import sample as reference_sample

ISAS = [name for name in ("avx512bf16", "avx512vnni", "avx2", "portable") if _native.has_isa(name)]
OK, NOT_FINITE, NOTHING_LEFT, BAD_TARGET = range(4)


class Sampled:
    """What the native sampler says of each row."""

    def __init__(self, chosen: np.ndarray, logprobs: np.ndarray, *top: np.ndarray) -> None:
        self.tokens, self.errors, self.ranks = chosen
        self.logprobs = logprobs[0]
        self.top_ids, self.top_logprobs = top


def sample(
    isa: str,
    logits: np.ndarray,
    controls: Sequence[Controls],
    *,
    logprobs: int = -1,
    targets: Sequence[int] | None = None,
    threads: int = 1,
) -> Sampled:
    def ragged(lists: list[tuple[int, ...]]) -> list[np.ndarray]:
        starts = [0, *accumulate(map(len, lists))] if any(lists) else []
        ids = [token for tokens in lists for token in tokens]
        return [np.array(starts, np.int32), np.array(ids, np.int32)]

    names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
    floats = [[getattr(c, name) for c in controls] for name in (*names, "frequency_penalty")]
    ints = [
        [c.top_k for c in controls],
        [c.position for c in controls],
        [logprobs] * len(controls),
        list(targets) if targets is not None else [-1] * len(controls),
        [len(c.prompt) for c in controls],
    ]
    bias_ids = [tuple(token for token, _ in c.logit_bias) for c in controls]
    lists = [
        *ragged(bias_ids),
        *ragged([c.banned for c in controls]),
        *ragged([c.prompt + c.output for c in controls]),
    ]
    values = [value for c in controls for _, value in c.logit_bias]
    return Sampled(
        *_native.sample(
            isa,
            threads,
            np.ascontiguousarray(logits, np.float32),
            np.array(floats, np.float32),
            np.array(ints, np.int32),
            np.array([c.seed & (2**64 - 1) for c in controls], np.uint64),
            lists,
            np.array(values, np.float32),
        )
    )


def expected(logits: np.ndarray, controls: Sequence[Controls]) -> list[int]:
    rows = torch.from_numpy(logits)
    return [reference_sample(row, c) for row, c in zip(rows, controls, strict=True)]


def random_controls(rng: np.random.Generator, vocab: int, count: int) -> list[Controls]:
    def tokens(most: int) -> tuple[int, ...]:
        # Some lie outside the vocabulary, and many are the same.
        return tuple(rng.integers(0, min(vocab + 3, 400), rng.integers(0, most)).tolist())

    return [
        Controls(
            temperature=float(rng.choice([0.0, 0.2, 0.7, 1.0, 1.7])),
            top_k=int(rng.choice([0, 0, 1, 7, 200, vocab - 1, vocab + 5])),
            top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5, 0.01])),
            min_p=float(rng.choice([0.0, 0.0, 0.02, 0.5])),
            presence_penalty=float(rng.choice([0.0, 0.0, 1.5, -0.5])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3, 0.8])),
            logit_bias=tuple((t, float(rng.normal() * 5)) for t in tokens(6)),
            banned=tokens(6),
            prompt=tokens(40),
            output=tokens(40),
            seed=int(rng.integers(-(2**63), 2**63)),
            position=int(rng.integers(0, 5000)),
        )
        for _ in range(count)
    ]


def kinds_of_logits(rng: np.random.Generator, vocab: int, count: int) -> np.ndarray:
    """Sharp, flat, and full of equals."""
    logits = rng.standard_normal((count, vocab)) * rng.choice([0.1, 1.0, 4.0, 15.0], (count, 1))
    coarse = rng.random(count) < 0.3
    logits[coarse] = np.round(logits[coarse])
    return logits.astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [3, 16, 300, 5003])
def test_same_token_as_the_reference(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    controls = random_controls(rng, vocab, 120)
    logits = kinds_of_logits(rng, vocab, len(controls))
    got = sample(isa, logits, controls)
    assert got.tokens.tolist() == expected(logits, controls)
    assert np.array_equal(got.errors == OK, got.tokens != NO_TOKEN)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
def test_a_wide_vocabulary_without_truncation(isa: str, spread: float) -> None:
    """Flat rows end in late segments, and rows of equals are decided by ids alone."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((6, 49152)) * spread).astype(np.float32)
    controls = [Controls(seed=s, position=9, top_p=p) for s in range(3) for p in (1.0, 0.8)]
    assert sample(isa, logits, controls).tokens.tolist() == expected(logits, controls)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 15, 128, 1000])
def test_greedy_takes_the_first_of_equals(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    greedy = [Controls(temperature=0.0)] * 20
    logits = rng.integers(-2, 3, (20, vocab)).astype(np.float32)
    assert sample(isa, logits, greedy).tokens.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("isa", ISAS)
def test_seed_and_position_decide_and_nothing_else(isa: str) -> None:
    rng = np.random.default_rng(7)
    controls = random_controls(rng, 900, 60)
    logits = kinds_of_logits(rng, 900, 60)
    together = sample(isa, logits, controls, logprobs=3)
    for threads in (2, 3):
        again = sample(isa, logits, controls, logprobs=3, threads=threads)
        assert np.array_equal(again.tokens, together.tokens)
        assert np.array_equal(again.top_logprobs, together.top_logprobs)
    for row in range(60):
        alone = sample(isa, logits[row : row + 1], controls[row : row + 1], logprobs=3)
        assert alone.tokens[0] == together.tokens[row]
        assert alone.logprobs[0] == together.logprobs[row]


@pytest.mark.parametrize("isa", ISAS)
def test_draws_follow_the_distribution(isa: str) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    logits = np.tile(np.log(probabilities).astype(np.float32), (4000, 1))
    got = sample(isa, logits, [Controls(seed=3, position=p) for p in range(4000)])
    shares = np.bincount(got.tokens, minlength=4) / 4000
    np.testing.assert_allclose(shares, probabilities, atol=0.03)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [5, 64, 1001])
def test_logprobs_are_of_the_raw_logits(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((24, vocab)) * 3, 1).astype(np.float32)  # with equals
    controls = random_controls(rng, vocab, 24)
    got = sample(isa, logits, controls, logprobs=4)
    fine = got.errors == OK
    assert fine.sum() > 12
    wanted = logprobs_of(torch.from_numpy(logits[fine]), torch.from_numpy(got.tokens[fine]), 4)
    np.testing.assert_allclose(got.logprobs[fine], wanted[0].numpy(), atol=2e-5)
    assert np.array_equal(got.ranks[fine], wanted[1].numpy())
    assert np.array_equal(got.top_ids[fine, :4], wanted[2].numpy())
    np.testing.assert_allclose(got.top_logprobs[fine, :4], wanted[3].numpy(), atol=2e-5)
    assert np.all(got.top_ids[fine, 4:] == -1)


@pytest.mark.parametrize("isa", ISAS)
def test_a_target_is_reported_on_not_sampled(isa: str) -> None:
    rng = np.random.default_rng(11)
    logits = rng.standard_normal((4, 50)).astype(np.float32)
    targets = [49, 0, 50, -1]
    controls = [Controls(seed=1, position=row) for row in range(4)]
    got = sample(isa, logits, controls, logprobs=0, targets=targets)
    assert got.errors.tolist() == [OK, OK, BAD_TARGET, OK]
    assert got.tokens[:3].tolist() == [49, 0, NO_TOKEN]
    assert got.tokens[3] == expected(logits[3:], controls[3:])[0]
    wanted = torch.from_numpy(logits).double().log_softmax(1)
    np.testing.assert_allclose(got.logprobs[0], wanted[0, 49], atol=1e-5)
    np.testing.assert_allclose(got.logprobs[1], wanted[1, 0], atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", [0, 130, 299])
def test_broken_rows_are_reported(isa: str, temperature: float, place: int) -> None:
    rng = np.random.default_rng(13)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    logits[0, place], logits[1, place], logits[2, place] = np.nan, np.inf, -np.inf
    everything = Controls(temperature=temperature, banned=tuple(range(300)))
    controls = [Controls(temperature=temperature)] * 3 + [everything]
    got = sample(isa, logits, controls)
    assert got.errors.tolist() == [NOT_FINITE, NOT_FINITE, OK, NOTHING_LEFT]
    assert got.tokens.tolist() == expected(logits, controls)
    # With a token to report on, the row's own numbers are broken all the same.
    reported = sample(isa, logits, controls, logprobs=1, targets=[5, 5, 5, 5])
    assert reported.errors.tolist() == [NOT_FINITE, NOT_FINITE, OK, OK]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 100.0])
def test_extreme_temperatures(isa: str, temperature: float) -> None:
    logits = np.array([[1.0, 3.0, 2.0, 3.0] * 10], np.float32)
    got = sample(isa, logits, [Controls(temperature=temperature, seed=2)])
    if temperature == 1e-40:
        assert got.tokens[0] == 1
    else:
        assert got.tokens.tolist() == expected(logits, [Controls(temperature=temperature, seed=2)])


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="instruction set"):
        sample("mmx", np.zeros((1, 4), np.float32), [Controls()])
    with pytest.raises(ValueError, match="floats"):
        sample(ISAS[0], np.zeros((2, 4), np.float32), [Controls()])
