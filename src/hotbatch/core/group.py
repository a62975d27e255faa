"""Siblings of one group (n > 1): one prompt, computed once.

The first sibling to be admitted leads. While it computes the prompt the others keep their
places in the queue and let later requests pass; afterwards they share its blocks. As they
wait for it, it inherits the class of the highest of them. If the leader is evicted or ends
first, the group has no leader, and whichever sibling is admitted next takes over, so nobody
waits for something that will not come.
"""

from __future__ import annotations

from hotbatch.core.request import Request, RequestState


class RequestGroup:
    """What siblings know of each other."""

    __slots__ = ("leader", "rank", "size")

    def __init__(self) -> None:
        self.size = 0
        self.rank = 0  # the highest class of those that joined
        self.leader: Request | None = None

    def lead(self, request: Request) -> None:
        """Called when a sibling was admitted; it leads if nobody else does."""
        if self.leader is None:
            self.leader = request

    def dethrone(self, request: Request) -> None:
        """Called when a sibling lost its blocks or ended."""
        if self.leader is request:
            self.leader = None

    def holds_back(self, request: Request) -> bool:
        """True if this sibling had better wait for another one that computes the prompt."""
        return self.leader is not request and self.is_prompt_pending()

    def holds_others(self, request: Request) -> bool:
        """True if siblings may wait for this one."""
        return self.leader is request and self.is_prompt_pending()

    def is_prompt_pending(self) -> bool:
        """True while a leader is at work on the prompt: siblings had better wait."""
        leader = self.leader
        return leader is not None and leader.num_committed < leader.num_prompt

    def prompt_owner(self) -> Request | None:
        """The sibling whose blocks hold the computed prompt, if one runs; not while pending."""
        assert not self.is_prompt_pending(), "the prompt is not computed yet"
        return self.leader


class GroupRegistry:
    """The groups with live members.

    Siblings are told by group id, prompt and salt together: a client that reuses a group id
    for another prompt gets another group, never another prompt's blocks.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str | None, tuple[int, ...]], RequestGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def join(self, request: Request) -> None:
        # Prompt logprobs need every row computed, so such a request shares nothing.
        if request.group_id is None or request.params.prompt_logprobs is not None:
            return
        group = self._groups.setdefault(self._key(request, request.group_id), RequestGroup())
        group.size += 1
        group.rank = max(group.rank, request.rank)
        request.group = group

    def leave(self, request: Request) -> None:
        group = request.group
        if group is None or request.group_id is None:
            return
        group.dethrone(request)
        group.size -= 1
        request.group = None
        if group.size == 0:
            del self._groups[self._key(request, request.group_id)]

    def check_integrity(self) -> None:
        for group in self._groups.values():
            assert group.size > 0, "an empty group was left behind"
            leader = group.leader
            assert leader is None or leader.state in (RequestState.RUNNING, RequestState.PAUSED), (
                f"{leader!r} leads but has no blocks"
            )

    @staticmethod
    def _key(request: Request, group_id: str) -> tuple[str, str | None, tuple[int, ...]]:
        return (group_id, request.cache_salt, tuple(request.tokens[: request.num_prompt]))
