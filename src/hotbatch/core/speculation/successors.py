"""Which request follows which: learnt from one client's requests, in the order they come.

A request that has ended is a turn. When the next request comes, the turns of lately are asked
which of them it follows: whose answer it holds, in which frame (`frames`). What follows depends
on where a program stands, so frames are counted by state: the end of the frame that made the
turn's own prompt, or for a turn that follows no other how its prompt begins, or that alone. Each of
these is told apart once more by whether the answer was cut for its length, which is when people and
programs say "continue". A turn is in several states, and the most particular one that was seen
often enough counts.

A frame is used once it was seen twice, and from this state at least once. Its chance in a state
is a running rate that forgets: of the turns in that state, how many did it foretell? That it did
not is known as soon as something else follows the turn, and supposed when others have passed it.

All is bounded: turns by number, frames by number and symbols, clients by number, the longest
unheard of first. Nothing is shared between clients (owners: tenant and cache salt).

Cost: a request costs some comparisons of strings, tens of microseconds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple

from hotbatch.core.speculation.frames import Beginning, Frame, induce

State = tuple[Hashable, ...]

_TRUST = {Beginning.UP_TO_HOLE: 0, Beginning.NOTHING: 1, Beginning.WITHOUT_TAIL: 2}

_SEEN_BEFORE_USE = 2  # observations of a frame
_MOST_TURNS = 64  # of an owner that may yet be followed
_PASSED_OVER = 8  # turns that ended after one that nothing followed: so far, nothing does
_MOST_TURN_SYMBOLS = 524_288  # of their prompts
_PATIENCE = 120.0  # seconds for which a turn may
_LONGEST_PROMPT = 65_536  # symbols; longer ones are not followed
_MOST_OWNERS = 128
_MOST_STATES = 256  # of an owner
_MOST_FRAMES = 12  # of a state
_MOST_SYMBOLS = 262_144  # of an owner's frames
_HEAD = 32  # symbols by which prompts that follow nothing are told apart
_KNOWN = 3  # observations after which a state counts before those that are less particular
_DOUBT = 1.0  # observations that the belief weighs
_BELIEF = 0.5
_MEMORY = 24.0  # observations that a rate remembers


class Successor(NamedTuple):
    """A prompt that may come next, and the chance that exactly it does.

    Attributes:
        hole: where the turn's answer stands in it.
        state: of a turn with this prompt.
    """

    prompt: str
    hole: int
    manner: Hashable
    chance: float
    state: State


class Turn:
    """A request as its successors see it; its `states` from the most particular one down."""

    __slots__ = ("answer", "ended_at", "followers", "hole", "missed", "prompt", "states")

    def __init__(self, prompt: str, states: tuple[State, ...], hole: int | None) -> None:
        self.prompt = prompt
        self.states = states
        self.hole = hole
        self.answer = ""
        self.ended_at = 0.0
        self.followers: set[Frame] = set()  # frames that foretold what followed
        self.missed: set[Frame] = set()  # frames that did not, as far as is known

    def end(self, answer: str, was_cut: bool) -> None:
        self.answer = answer
        self.states = tuple(known for state in self.states for known in ((*state, was_cut), state))


class Arrival(NamedTuple):
    """A request that came: its turn, and the one that it follows, if one is known."""

    turn: Turn
    follows: Turn | None


class _Rate:
    """How often a frame foretold what follows, as a running share."""

    __slots__ = ("num_seen", "right", "total")

    def __init__(self) -> None:
        self.num_seen = 0  # of the observations of its frame, those that are counted here
        self.right = 0.0
        self.total = 0.0

    def note(self, is_right: bool) -> None:
        if self.total >= _MEMORY:
            kept = 1.0 - 1.0 / _MEMORY
            self.right *= kept
            self.total *= kept
        self.right += is_right
        self.total += 1.0

    def forgive(self) -> None:
        """What was noted as wrong has come after all."""
        self.total = max(self.right, self.total - 1.0)

    @property
    def chance(self) -> float:
        return (self.right + _BELIEF * _DOUBT) / (self.total + _DOUBT)


class Habits:
    """What one owner's requests show."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()
        self._rates: OrderedDict[State, dict[Frame, _Rate]] = OrderedDict()
        self._seen: dict[Frame, int] = {}  # observations in all states; those of `_rates` only
        self._num_symbols = 0

    def __len__(self) -> int:
        """Symbols of the frames that are remembered."""
        return self._num_symbols

    def arrive(self, prompt: str, manner: Hashable, now: float) -> Arrival:
        """A request comes: learn whom it follows."""
        self._forget_turns(now)
        for turn in reversed(self._turns):
            rendered = self._foretold(turn, prompt, manner)
            if rendered is not None:
                return self._follow(turn, prompt, manner, *rendered)
        for turn in reversed(self._turns):
            frames = induce(turn.prompt, turn.answer, turn.hole, prompt, manner)
            if frames:
                hole = len(prompt) - len(frames[0].end) - _inserted(frames[0], turn)
                return self._follow(turn, prompt, manner, frames, hole)
        states = (("begins", manner, prompt[:_HEAD]), ("begins", manner))
        return Arrival(Turn(prompt, states, None), None)

    def end(self, turn: Turn, answer: str, was_cut: bool, now: float) -> None:
        """A request has its answer, and may be followed."""
        if len(turn.prompt) > _LONGEST_PROMPT:
            return
        turn.end(answer, was_cut)
        turn.ended_at = now
        self._turns.append(turn)
        if len(self._turns) > _PASSED_OVER:
            self._note_missed(self._turns[-1 - _PASSED_OVER])
        self._forget_turns(now)

    def successors(self, turn: Turn) -> list[Successor]:
        """What may follow a turn, the likeliest first; no prompt twice."""
        best: dict[tuple[str, Hashable], Successor] = {}
        # Of equals, the beginning that depends least on lengths that happen to be the same.
        known = sorted(self._rates_at(turn).items(), key=lambda item: _TRUST[item[0].beginning])
        for frame, rate in known:
            if not rate.right or self._seen[frame] < _SEEN_BEFORE_USE:
                continue
            rendered = frame.render(turn.prompt, turn.answer, turn.hole)
            if rendered is None or len(rendered.prompt) > _LONGEST_PROMPT:
                continue
            key = (rendered.prompt, frame.manner)
            if key not in best or best[key].chance < rate.chance:
                state = _state_of(frame)
                best[key] = Successor(*rendered, frame.manner, rate.chance, state)
        return sorted(best.values(), key=lambda successor: -successor.chance)

    # Learning

    def _foretold(
        self, turn: Turn, prompt: str, manner: Hashable
    ) -> tuple[list[Frame], int] | None:
        """The known frames that make this prompt of the turn, and where its answer stands."""
        frames, hole = [], 0
        known = {frame: None for state in turn.states for frame in self._rates.get(state, ())}
        for frame in known:
            if frame.manner != manner or not prompt.endswith(frame.end):
                continue
            rendered = frame.render(turn.prompt, turn.answer, turn.hole)
            if rendered is not None and rendered.prompt == prompt:
                frames.append(frame)
                hole = rendered.hole
        return (frames, hole) if frames else None

    def _follow(
        self, turn: Turn, prompt: str, manner: Hashable, frames: list[Frame], hole: int
    ) -> Arrival:
        news = [frame for frame in frames if frame not in turn.followers]  # each once a turn
        for state in turn.states:
            rates = self._rates_of(state)
            for frame in news:
                rate = rates.get(frame)
                if rate is None:
                    rate = self._remember(rates, frame)
                elif frame in turn.missed:
                    rate.forgive()
                rate.note(True)
                self._seen[frame] += state is turn.states[-1]
                rate.num_seen += state is turn.states[-1]
        turn.followers.update(news)
        self._note_missed(turn)
        turn.missed.difference_update(news)
        self._bound()
        return Arrival(Turn(prompt, (_state_of(frames[0]),), hole), turn)

    def _note_missed(self, turn: Turn) -> None:
        missed = set()
        for state in turn.states:
            for frame, rate in self._rates.get(state, {}).items():
                if frame not in turn.followers and frame not in turn.missed:
                    missed.add(frame)
                    rate.note(False)
        turn.missed |= missed

    def _rates_at(self, turn: Turn) -> dict[Frame, _Rate]:
        """Rates of the most particular state of a turn that is known."""
        for state in turn.states[:-1]:
            rates = self._rates.get(state, {})
            if any(rate.total >= _KNOWN for rate in rates.values()):
                return rates
        return self._rates.get(turn.states[-1], {})

    def _forget_turns(self, now: float) -> None:
        turns = self._turns
        num_symbols = sum(len(turn.prompt) for turn in turns)
        while turns and (
            len(turns) > _MOST_TURNS
            or num_symbols > _MOST_TURN_SYMBOLS
            or now - turns[0].ended_at > _PATIENCE
        ):
            forgotten = turns.popleft()
            num_symbols -= len(forgotten.prompt)
            self._note_missed(forgotten)

    # Remembering

    def _rates_of(self, state: State) -> dict[Frame, _Rate]:
        rates = self._rates.setdefault(state, {})
        self._rates.move_to_end(state)
        return rates

    def _remember(self, rates: dict[Frame, _Rate], frame: Frame) -> _Rate:
        while len(rates) >= _MOST_FRAMES:
            self._drop(rates, min(rates, key=lambda known: rates[known].right))
        rate = rates[frame] = _Rate()
        self._seen.setdefault(frame, 0)
        self._num_symbols += frame.size
        return rate

    def _bound(self) -> None:
        while len(self._rates) > 1 and (
            len(self._rates) > _MOST_STATES or self._num_symbols > _MOST_SYMBOLS
        ):
            _, rates = self._rates.popitem(last=False)
            for frame in list(rates):
                self._drop(rates, frame)

    def _drop(self, rates: dict[Frame, _Rate], frame: Frame) -> None:
        rate = rates.pop(frame)
        self._num_symbols -= frame.size
        self._seen[frame] -= rate.num_seen
        if not any(frame in others for others in self._rates.values()):
            del self._seen[frame]


class Successors:
    """The habits of all owners; the one that was not heard of for longest is forgotten first."""

    def __init__(self) -> None:
        self._habits: OrderedDict[Hashable, Habits] = OrderedDict()

    def __len__(self) -> int:
        return len(self._habits)

    def of(self, owner: Hashable) -> Habits:
        habits = self._habits.get(owner)
        if habits is None:
            habits = self._habits[owner] = Habits()
            if len(self._habits) > _MOST_OWNERS:
                self._habits.popitem(last=False)
        else:
            self._habits.move_to_end(owner)
        return habits


def _state_of(frame: Frame) -> State:
    return ("after", frame.end, frame.manner)


def _inserted(frame: Frame, turn: Turn) -> int:
    return len(turn.answer.strip() if frame.is_stripped else turn.answer)
