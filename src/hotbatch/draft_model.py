"""Loads a draft model beside a model and joins the two; part of the assembly.

The draft model must speak the model's tokens: same vocabulary, id by id. It runs at the model's
precision on its device, with a cache of its own that is small, as only running requests are in it.
"""

from __future__ import annotations

from collections.abc import Callable

from hotbatch.core.config import SchedulerConfig
from hotbatch.core.cost_model import CostModel
from hotbatch.core.errors import ModelLoadError, OptionError
from hotbatch.core.speculation.draft_model import DraftModel, DraftModelShape
from hotbatch.engine.clock import MonotonicClock
from hotbatch.engine.protocol import Executor, ExecutorInfo
from hotbatch.engine.warm_up import warm_up
from hotbatch.executor.drafting import DraftingExecutor
from hotbatch.executor.kv_sizing import kv_bytes_per_token
from hotbatch.models.loader import LoadedModel, load_model
from hotbatch.options import EngineOptions
from hotbatch.text import Tokenizer

FLAG = "--draft-model"
_CACHE_BYTES = 256 * 2**20  # at most, and no more tokens than the model's own cache


def load_draft_model(
    options: EngineOptions,
    tokenizer: Tokenizer,
    tokenizer_of: Callable[[LoadedModel], Tokenizer],
) -> LoadedModel | None:
    """The model that `--draft-model` names; None where it names none.

    Raises:
        OptionError: it cannot be loaded, or speaks other tokens than the model.
    """
    if options.draft_model is None:
        return None
    try:
        # Made-up weights of another seed: the same ones would guess everything right.
        draft = load_model(options.draft_model, options.load_format, seed=options.seed + 1)
        spoken = tokenizer_of(draft)
    except ModelLoadError as error:
        raise OptionError(f"{FLAG} {options.draft_model}: {error.message}", param=FLAG) from error
    if spoken.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise OptionError(
            f"{FLAG} {options.draft_model} has another vocabulary ({spoken.vocab_size} tokens) "
            f"than {options.model} ({tokenizer.vocab_size}): its guesses would mean other text. "
            "Use a smaller model of the same family.",
            param=FLAG,
        )
    return draft


def num_draft_blocks(draft: LoadedModel, info: ExecutorInfo, kv_dtype: str) -> int:
    """KV blocks of the draft model."""
    config = draft.config
    per_token = kv_bytes_per_token(
        config.num_layers, config.num_kv_heads, config.head_dim, kv_dtype
    )
    return max(1, min(info.num_blocks, _CACHE_BYTES // (per_token * info.block_size)))


def join(
    model: Executor, draft_model: Executor, config: SchedulerConfig
) -> tuple[DraftingExecutor, DraftModel]:
    """Both as one executor, and what the scheduler is to know of the draft model, whose passes are
    timed here."""
    info = draft_model.info
    cost_model = CostModel()
    warm_up(
        draft_model,
        cost_model,
        MonotonicClock(),
        max_tokens=config.max_num_batched_tokens,
        max_requests=config.max_num_seqs,
    )
    shape = DraftModelShape(info.num_blocks, info.block_size, info.context_len, info.vocab_size)
    return DraftingExecutor(model, draft_model), DraftModel(cost_model, shape)
