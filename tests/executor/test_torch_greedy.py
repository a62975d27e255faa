"""Greedy continuations of the embedded model: token for token those of transformers in f32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import transformers

from hotbatch.core.plan import PlannedRequest, SampleSpec, StepPlan
from hotbatch.core.sampling_params import SamplingParams
from hotbatch.engine.protocol import Executor
from hotbatch.executor.torch_executor import TorchExecutor
from hotbatch.models.embedded import embedded_model_path
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.text.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small dragon who",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "1, 1, 2, 3, 5, 8,",
    "In 1969, astronauts",
    "To bake bread, you need",
    "SELECT name FROM",
    "The opposite of hot is",
    "Hà Nội là thủ đô của",
    "Le chat est assis sur",
    "import numpy as np\n\n",
    "Q: What is photosynthesis?\nA:",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "The mitochondria is",
    "Roses are red,",
    "My favourite animal is the",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "She opened the letter and",
    "{",
)
LENGTH = 64
BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """torch's threads wait for each other for ages when something else uses a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(embedded_model_path())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(embedded_model_path())
    return [list(tokenizer.encode(text)) for text in PROMPTS]


def transformers_model(model: LoadedModel) -> transformers.LlamaForCausalLM:
    """The same checkpoint, read by transformers' own GGUF code."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    shape = model.config
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_position_embeddings,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=True,
        )
    ).eval()
    loaded = load_gguf_checkpoint(
        str(model.tokenizer_source), return_tensors=True, model_to_load=reference
    )
    missing = reference.load_state_dict(loaded["tensors"], strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])  # the head is tied
    return reference


@torch.inference_mode()
def transformers_choices(
    reference: transformers.LlamaForCausalLM, prompt: list[int], tokens: list[int]
) -> tuple[list[int], list[float]]:
    """What transformers picks after the prompt and after each of `tokens` but the last, and how
    far each pick leads the next best. One pass suffices: if every pick equals the token that
    follows, then its greedy continuation is `tokens`."""
    logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.topk(2, dim=1)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def greedy(executor: Executor, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts at once: whole prompts in the first step, then one token each."""
    tokens = [list(prompt) for prompt in prompts]
    room = -(-(max(map(len, prompts)) + LENGTH) // BLOCK_SIZE)
    done = [0] * len(prompts)
    for step_id in range(LENGTH):
        requests = [
            PlannedRequest(
                str(index),
                done[index],
                tuple(known[done[index] :]),
                tuple(range(index * room, index * room + -(-len(known) // BLOCK_SIZE))),
                SampleSpec(SamplingParams(temperature=0.0), 0, len(known), len(prompts[index])),
            )
            for index, known in enumerate(tokens)
        ]
        done = [len(known) for known in tokens]
        result = executor.run(StepPlan(step_id, tuple(requests)))
        for known, answer in zip(tokens, result.requests, strict=True):
            known += answer.token_ids
    return [known[len(prompt) :] for known, prompt in zip(tokens, prompts, strict=True)]


@pytest.mark.slow
def test_continuations_equal_transformers(model: LoadedModel, prompts: list[list[int]]) -> None:
    executor = TorchExecutor(model, num_blocks=len(prompts) * 12, block_size=BLOCK_SIZE)
    found = greedy(executor, prompts)
    reference = transformers_model(model)
    for text, prompt, tokens in zip(PROMPTS, prompts, found, strict=True):
        expected, leads = transformers_choices(reference, prompt, tokens)
        assert len(tokens) == LENGTH and tokens == expected, (text, min(leads))
