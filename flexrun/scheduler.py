"""Which sequences take part in the next pass, and with how many tokens. Bookkeeping only.

A block has num_gpu_batches x gpu_batch_size slots. `refill`: a finished sequence's slot is taken by a waiting
one in the next pass, so a pass mixes prompts with running sequences. `static`: a new block begins when the
last one has ended (FlexGen's schedule: prefill all, decode all). A sequence is admitted when a slot is free
and all the KV pages it can ever need are; it then never has to be thrown out again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flexrun.detokenize import IncrementalDetokenizer
from flexrun.request import Logprob, SamplingParams
from flexrun.sampling import SamplingState
from offload.kv import SEGMENT_TOKENS, CacheSequence, PageAllocator
from policy.tiers import ScheduleName


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """One sequence: a prompt and one of its answers.

    prompt: what is computed; known: the same and, for scoring, the last token, which is only scored.
    n_stored: prompt and answer tokens whose K and V are in the cache. score_from: first prompt position
    whose own log-probability is wanted, -1 for none.
    """

    request_id: str
    index: int
    prompt: list[int]
    known: list[int]
    params: SamplingParams
    max_tokens: int
    sampling: SamplingState
    detokenizer: IncrementalDetokenizer | None
    score_from: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    prompt_greedy: list[bool] = field(default_factory=list)
    place: CacheSequence | None = None
    n_stored: int = 0

    @property
    def total_tokens(self) -> int:
        """Most tokens that its KV pages will hold: the last answer token is never stored."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def in_prompt(self) -> bool:
        return self.n_stored < len(self.prompt)


@dataclass(frozen=True, slots=True)
class Step:
    """The next n_tokens of a sequence. in_prompt: they belong to its prompt; ends_prompt: to the prompt's end."""

    completion: Completion
    n_tokens: int
    in_prompt: bool

    @property
    def ends_prompt(self) -> bool:
        c = self.completion
        return self.in_prompt and c.n_stored + self.n_tokens == len(c.prompt)

    @property
    def samples(self) -> bool:
        """Whether this step makes a new token."""
        return (self.ends_prompt or not self.in_prompt) and self.completion.max_tokens > 0


class Scheduler:
    """Waiting and running sequences of one engine.

    pass_tokens: most tokens one gpu batch brings to a pass (at least gpu_batch_size and SEGMENT_TOKENS).
    """

    def __init__(self, allocator: PageAllocator, *, schedule: ScheduleName, pass_tokens: int) -> None:
        shape = allocator.shape
        if pass_tokens < max(shape.gpu_batch_size, 1):
            raise ValueError(
                f"pass_tokens must be at least the gpu batch size ({shape.gpu_batch_size}), got {pass_tokens}"
            )
        self._allocator = allocator
        self._schedule = schedule
        self._pass_tokens = pass_tokens
        self._waiting: deque[Completion] = deque()
        self._running: list[list[Completion]] = [[] for _ in range(shape.num_gpu_batches)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(batch) for batch in self._running)

    def add(self, completion: Completion) -> None:
        self._waiting.append(completion)

    def remove(self, request_id: str) -> None:
        """Forget all sequences of a request, waiting or running."""
        self._waiting = deque(c for c in self._waiting if c.request_id != request_id)
        for batch in self._running:
            for completion in [c for c in batch if c.request_id == request_id]:
                self.finish(completion)

    def finish(self, completion: Completion) -> None:
        """A running sequence has ended: its slot and pages are free for the next pass."""
        assert completion.place is not None
        self._running[completion.place.batch].remove(completion)
        self._allocator.release(completion.place)
        completion.place = None

    def next_pass(self) -> list[list[Step]]:
        """Steps of each gpu batch (some may be empty); running sequences first, then admitted ones."""
        admitting = self._schedule == "refill" or self.num_running == 0
        plan: list[list[Step]] = []
        for j, running in enumerate(self._running):
            room = self._pass_tokens
            steps: list[Step] = []
            for completion in running:
                if not completion.in_prompt:
                    steps.append(Step(completion, 1, False))
                    room -= 1
            for completion in running:
                if completion.in_prompt:
                    room -= self._prompt_step(completion, room, steps)
            while admitting and self._waiting and room > 0:
                completion = self._waiting[0]
                if self._next_piece(completion, room) == 0:
                    break
                place = self._allocator.admit(j, completion.total_tokens)
                if place is None:
                    break
                self._waiting.popleft()
                completion.place = place
                running.append(completion)
                room -= self._prompt_step(completion, room, steps)
            plan.append(steps)
        return plan

    def _prompt_step(self, completion: Completion, room: int, steps: list[Step]) -> int:
        n = self._next_piece(completion, room)
        if n:
            steps.append(Step(completion, n, True))
        return n

    def _next_piece(self, completion: Completion, room: int) -> int:
        """How much of its prompt a sequence computes within `room` tokens: all, or up to a segment's end."""
        left = len(completion.prompt) - completion.n_stored
        if left <= room:
            return left
        return (completion.n_stored + room) // SEGMENT_TOKENS * SEGMENT_TOKENS - completion.n_stored

    def is_last(self, plan: list[list[Step]]) -> bool:
        """Whether nothing can be left to do after this pass: every sequence in it reaches its length."""
        if self._waiting:
            return False
        for steps in plan:
            for step in steps:
                c = step.completion
                done = step.ends_prompt or not step.in_prompt
                if not done or len(c.tokens) + 1 < c.max_tokens:
                    return False
        return sum(len(steps) for steps in plan) == self.num_running
