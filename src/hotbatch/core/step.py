"""A step while it is planned, and until it is committed."""

from __future__ import annotations

from math import inf

from hotbatch.core.cost_model import StepFeatures
from hotbatch.core.plan import ModelDraft, PlannedRequest, SampleSpec
from hotbatch.core.request import Request
from hotbatch.core.step_mix import HeldBack, StepMix


class Step:
    """What enters a step, and what is left of its budget of tokens.

    `requests` runs parallel to `planned`; results are booked on these objects, not looked up
    by id, as a cancelled request's id may be in use again by then. The sums are what the cost
    model wants to know (see `StepFeatures`); those of the single tokens that are sampled from
    are kept beside (`num_decodes`, `decode_context`). Guessed requests come last (`num_ahead`);
    `asked` are the sums without them, and `ahead_seconds` what they add, predicted. `gap` are the
    seconds that a token of those who decode may take beside prompts (see `StepClock`).
    """

    __slots__ = (
        "ahead_seconds",
        "asked",
        "attended",
        "budget",
        "context_tokens",
        "copies",
        "decode_context",
        "decode_reads",
        "draft_seconds",
        "features",
        "gap",
        "is_warming",
        "model_drafts",
        "num_ahead",
        "num_decodes",
        "num_drafts",
        "num_recomputed",
        "num_sampled",
        "num_tokens",
        "planned",
        "prompts",
        "requests",
    )

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.planned: list[PlannedRequest] = []
        self.requests: list[Request] = []
        self.copies: list[tuple[int, int]] = []
        self.num_tokens = 0
        self.context_tokens = 0
        self.attended = 0
        self.num_sampled = 0
        self.num_decodes = 0
        self.decode_context = 0
        self.decode_reads = 0  # the same, but what several begin with once
        self.num_drafts = 0
        self.num_recomputed = 0
        self.model_drafts: tuple[ModelDraft, ...] = ()
        self.gap = inf
        self.draft_seconds = 0.0  # predicted for these
        self.num_ahead = 0
        self.is_warming = False  # these are the beginning of a next turn
        self.ahead_seconds = 0.0
        self.asked: StepFeatures | None = None
        self.prompts = StepFeatures()  # the part of the sums that does not decode
        self.features: StepFeatures | None = None

    def mix(self, held_back: HeldBack | None) -> StepMix:
        """What it is made of, once it is full."""
        all_rows, prompts = self.features or self.measure(), self.prompts
        if self.num_ahead:
            assert self.asked is not None
            ahead = all_rows.minus(self.asked)
            # Guesses join decodes only.
            return StepMix(self.asked, self.asked, self.num_drafts, 0, held_back, ahead)
        decode = all_rows
        if prompts.num_tokens:
            decode = all_rows.minus(prompts)
        return StepMix(all_rows, decode, self.num_drafts, self.num_recomputed, held_back)

    def measure(self) -> StepFeatures:
        self.features = StepFeatures(
            self.num_tokens,
            len(self.planned),
            self.context_tokens,
            self.attended,
            self.num_sampled,
        )
        return self.features

    def enter_chunk(self, request: Request, size: int) -> None:
        """The next `size` tokens of what is not computed."""
        start = request.num_computed
        end = start + size
        num_known = len(request.tokens)
        if size > 1 or start < request.num_prompt or end < num_known:
            self.prompts = self.prompts.plus_chunk(
                start, size, int(end >= num_known), request.num_shared
            )
        if request.num_evictions:
            self.num_recomputed += max(0, min(end, request.num_once_computed) - start)
        self.enter(request, tuple(request.tokens[start:end]))

    def close_asked(self) -> None:
        """Everybody who asked is in."""
        self.asked = self.measure()

    def enter_ahead(self, request: Request, size: int) -> None:
        """The next `size` tokens of a guessed request, after `close_asked`."""
        start = request.num_computed
        self.enter(request, tuple(request.tokens[start : start + size]))
        self.num_ahead += 1

    def enter(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Compute these tokens; the request counts them as computed from now on."""
        start = request.num_computed
        size = len(tokens)
        end = start + size
        num_known = len(request.tokens)
        sample = None
        if end >= num_known:
            sample = SampleSpec(
                request.params,
                request.seed,
                num_known,
                request.num_prompt,
                tuple(request.tokens) if request.needs_history else (),
                request.banned() if request.banned_early else (),
            )
            self.num_sampled += 1
            if size == 1:
                self.num_decodes += 1
                self.decode_context += end
                self.decode_reads += end - request.num_shared
        next_tokens: tuple[int, ...] = ()
        if request.params.prompt_logprobs is not None and num_known == request.num_prompt:
            next_tokens = tuple(request.tokens[start + 1 : end + 1])
        self.planned.append(
            PlannedRequest(
                request.request_id,
                start,
                tokens,
                request.block_table,
                sample,
                0,
                request.params.prompt_logprobs if next_tokens else None,
                next_tokens,
            )
        )
        self.requests.append(request)
        self.budget -= size
        self.num_tokens += size
        self.context_tokens += end - request.num_shared
        self.attended += end if size == 1 else size * start + size * (size + 1) // 2
        request.num_computed = end
        request.in_flight += 1

    def add_drafts(self, index: int, drafts: tuple[int, ...]) -> None:
        """Let guessed tokens follow the last token of the request at `index`, which samples.

        Its block table must have room for them.
        """
        planned, request = self.planned[index], self.requests[index]
        count = len(drafts)
        end = request.num_computed
        attended = count * end + count * (count + 1) // 2
        if len(planned.tokens) > 1 or planned.start < request.num_prompt:
            prompts = self.prompts
            self.prompts = StepFeatures(
                prompts.num_tokens + count,
                prompts.num_requests,
                prompts.context_tokens + count,
                prompts.attended + attended,
                prompts.num_sampled + count,
            )
        self.planned[index] = planned._replace(
            tokens=planned.tokens + drafts, block_ids=request.block_table, num_drafts=count
        )
        self.budget -= count
        self.num_tokens += count
        self.num_sampled += count
        self.num_drafts += count
        self.context_tokens += count
        self.attended += attended
        request.num_computed = end + count

    def enter_decodes(self, requests: list[Request]) -> None:
        """`enter` for requests of which one token is not computed: of hundreds in every step, so
        what each costs counts."""
        planned, entered = self.planned, self.requests
        num_sampled = context = shared = 0
        for request in requests:
            tokens = request.tokens
            end = len(tokens)
            if end <= request.num_prompt:
                self.enter(
                    request, (tokens[-1],)
                )  # a prompt's last token, which may be asked about
                continue
            spec = SampleSpec(
                request.params,
                request.seed,
                end,
                request.num_prompt,
                tuple(tokens) if request.needs_history else (),
                request.banned() if request.banned_early else (),
            )
            planned.append(
                PlannedRequest(
                    request.request_id, end - 1, (tokens[-1],), request.block_table, spec
                )
            )
            entered.append(request)
            num_sampled += 1
            context += end
            shared += request.num_shared
            request.num_computed = end
            request.in_flight += 1
        self.num_sampled += num_sampled
        self.num_decodes += num_sampled
        self.budget -= num_sampled
        self.num_tokens += num_sampled
        self.decode_context += context
        self.decode_reads += context - shared
        self.context_tokens += context - shared
        self.attended += context
