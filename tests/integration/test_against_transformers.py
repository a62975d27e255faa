"""What a server at f32 answers, judged by Hugging Face transformers on the same GGUF file.

transformers is asked once for each answer: one forward pass over prompt and answer gives its
logits at every position. If the likeliest token is the answer's at each of them, then its own
greedy continuation is the same, token by token, by induction. (Its pass over a whole text and
its steps with a cache round differently, but compute the same.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from served_model import MODEL, ServedModel, serve_model

from hotbatch.models.embedded import embedded_model_path

NUM_TOKENS = 64
# Two likeliest tokens nearer to each other than this cannot be told apart by rounding in f32.
TIE = 1e-3
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of the sea,",
    "def fibonacci(n):\n    ",
    "import json\n\nwith open('data.json') as file:\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at 100 degrees because",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is the largest planet?\nA:",
    "Thủ đô của Việt Nam là",
    "Der schnelle braune Fuchs",
    "La Révolution française",
    "🌍🌎🌏",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "<html>\n<head>\n<title>",
    "# Shopping list\n\n- milk\n- eggs\n-",
    "SELECT name, COUNT(*) FROM",
    "x",
    "    ",
    "THE END\n\n\n",
    "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer",
    "A batch is a group of things handled together. " * 12 + "In short, a batch is",
    "Alice: Where have you been?\nBob: At the harbour.\nAlice: What did you see?\nBob:",
)


@dataclass(frozen=True)
class Answer:
    """What the server said: tokens, their log-probabilities, and the best five of each."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]


@pytest.fixture(scope="module")
def server() -> Iterator[ServedModel]:
    with serve_model("--precision", "f32", "--kv-cache-memory-bytes", "256M") as server:
        yield server


@pytest.fixture(scope="module")
def answers(server: ServedModel) -> list[Answer]:
    """Greedy continuations of all prompts, in one batch."""

    async def at_once() -> list[Answer]:
        async with server.async_client() as client:
            ask = partial(client.completions.create, model=MODEL, temperature=0.0, logprobs=5)
            extra = {
                "ignore_eos": True,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            }
            return [
                _answer(completion.choices[0].model_dump())
                for completion in await asyncio.gather(
                    *[ask(prompt=text, max_tokens=NUM_TOKENS, extra_body=extra) for text in PROMPTS]
                )
            ]

    return asyncio.run(at_once())


def _answer(choice: dict[str, Any]) -> Answer:
    scored = choice["logprobs"]
    return Answer(
        prompt_ids=choice["prompt_token_ids"],
        token_ids=choice["token_ids"],
        logprobs=scored["token_logprobs"],
        top=[
            {_token_id(name): value for name, value in best.items()}
            for best in scored["top_logprobs"]
        ],
    )


def _token_id(name: str) -> int:
    """From "token_id:123"."""
    return int(name.removeprefix("token_id:"))


@pytest.fixture(scope="module")
def expected(answers: list[Answer]) -> list[torch.Tensor]:
    """transformers' logits at the positions that gave each answer's tokens: f32 [64, vocab]."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait busily for each other
    try:
        model = _reference_model()
        return [_logits_of_answer(model, answer) for answer in answers]
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _logits_of_answer(model: Any, answer: Answer) -> torch.Tensor:
    ids = torch.tensor([answer.prompt_ids + answer.token_ids[:-1]])
    return model(ids, logits_to_keep=len(answer.token_ids)).logits[0]


def _reference_model() -> Any:
    """The embedded model as transformers reads it: config, names and numbers are its own."""
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = embedded_model_path()
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]  # tied
    model.load_state_dict(tensors)
    return model


@pytest.mark.slow
def test_greedy_continuations_are_identical(
    answers: list[Answer], expected: list[torch.Tensor]
) -> None:
    divergent = 0
    for text, answer, logits in zip(PROMPTS, answers, expected, strict=True):
        assert len(answer.token_ids) == NUM_TOKENS
        chosen = torch.tensor(answer.token_ids)
        wrong = (logits.argmax(dim=1) != chosen).nonzero()
        if len(wrong):
            first = int(wrong[0])
            gap = float(logits[first].max() - logits[first, chosen[first]])
            assert gap < TIE, f"{text!r} differs at token {first}, and it is no tie: {gap}"
            divergent += 1
    assert len(PROMPTS) - divergent >= 20


@pytest.mark.slow
def test_logprobs_are_those_of_transformers(
    answers: list[Answer], expected: list[torch.Tensor]
) -> None:
    for answer, logits in zip(answers, expected, strict=True):
        logprobs = logits.double().log_softmax(dim=1)
        for index, token in enumerate(answer.token_ids):
            row = logprobs[index]
            assert answer.logprobs[index] == pytest.approx(float(row[token]), abs=1e-3)
            best = row.topk(5)
            top = answer.top[index]
            assert sorted(top.values(), reverse=True) == pytest.approx(
                best.values.tolist(), abs=1e-3
            )
            for other, value in top.items():
                assert value == pytest.approx(float(row[other]), abs=1e-3)


@pytest.mark.slow
def test_logprobs_of_a_prompt_and_of_a_chat(
    server: ServedModel, answers: list[Answer], expected: list[torch.Tensor]
) -> None:
    """An answer fed back as a prompt is scored as it was when it was made; and the chat
    endpoint says the same in its own form."""
    answer = answers[0]
    num_prompt = len(answer.prompt_ids)
    with server.client() as client:
        echoed = client.completions.create(
            model=MODEL,
            prompt=answer.prompt_ids + answer.token_ids,
            echo=True,
            logprobs=0,
            max_tokens=1,
        )
        messages: Any = [{"role": "user", "content": "Name one river."}]
        chat = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            temperature=0.0,
            max_tokens=8,
            logprobs=True,
            top_logprobs=2,
        )
    scored = echoed.choices[0].logprobs
    assert scored is not None and scored.token_logprobs is not None
    assert scored.token_logprobs[num_prompt:-1] == answer.logprobs
    logprobs = expected[0].double().log_softmax(dim=1)
    for index, token in enumerate(answer.token_ids):
        found = scored.token_logprobs[num_prompt + index]
        assert found == pytest.approx(float(logprobs[index, token]), abs=1e-3)
    content = chat.choices[0].logprobs
    assert content is not None and content.content is not None
    for entry in content.content:
        assert entry.logprob == entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
