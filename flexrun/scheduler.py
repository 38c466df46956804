"""Which sequences take part in the next pass, and with how many tokens. Bookkeeping only.

A block has num_gpu_batches x gpu_batch_size slots. `refill`: a finished sequence's slot is taken by a waiting
one in the next pass, so a pass mixes prompts with running sequences. `static`: a new block begins when the
last one has ended, and all its prompts are computed before any second token (FlexGen's schedule: prefill all,
then decode all). A sequence is admitted when a slot is free and all the KV pages it can ever need are; it then
never has to be thrown out again. Sequences are admitted in the order in which they came.

Every pass makes progress: where a prompt's next piece does not fit beside the running sequences, the last of
these sit the pass out, so that long prompts never starve and running sequences wait only for prompts that hold a
slot already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from flexrun.detokenize import IncrementalDetokenizer
from flexrun.request import Logprob, SamplingParams
from flexrun.sampling import SamplingState
from offload.pages import SEGMENT_TOKENS, CacheSequence, PageAllocator
from policy.tiers import ScheduleName


@dataclass(slots=True, kw_only=True, eq=False)
class Completion:
    """One sequence: a prompt and one of its answers.

    prompt: what is computed; known: the same and, for scoring, the last token, which is only scored.
    n_stored: prompt and answer tokens whose K and V are in the cache. score_from: first prompt position
    whose own log-probability is wanted, -1 for none. n_restarted: answer tokens that were computed anew with the
    prompt, as one prompt, when last the KV cache had to be remade.
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
    place: CacheSequence | None = None
    n_stored: int = 0
    n_restarted: int = 0

    @property
    def total_tokens(self) -> int:
        """Most tokens that its KV pages will hold: the last answer token is never stored."""
        return len(self.prompt) + max(self.max_tokens - 1, 0)

    @property
    def prefill_len(self) -> int:
        """Tokens that are computed as a prompt: the prompt, and the answer so far at the last restart."""
        return len(self.prompt) + self.n_restarted

    @property
    def in_prompt(self) -> bool:
        return self.n_stored < self.prefill_len

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens start .. stop of prompt and answer."""
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        return self.prompt[start:n] + self.tokens[max(start - n, 0) : stop - n]


@dataclass(frozen=True, slots=True)
class Step:
    """The next n_tokens of a sequence. in_prompt: they belong to its prompt; ends_prompt: to the prompt's end."""

    completion: Completion
    n_tokens: int
    in_prompt: bool

    @property
    def ends_prompt(self) -> bool:
        c = self.completion
        return self.in_prompt and c.n_stored + self.n_tokens == c.prefill_len

    @property
    def samples(self) -> bool:
        """Whether this step makes a new token."""
        return (self.ends_prompt or not self.in_prompt) and self.completion.max_tokens > 0


class Scheduler:
    """Waiting and running sequences of one engine.

    pass_tokens: most tokens one gpu batch brings to a pass, at least gpu_batch_size. Prompts of more tokens are
    computed over several passes, in pieces that end at multiples of SEGMENT_TOKENS.
    compact: few sequences go into as few gpu batches as have slots for them, where each fills over several passes.
    That is the better choice where a pass streams no weights: a gpu batch of few rows costs a kernel launch, or a
    walk over the weights, like one of many.
    """

    def __init__(
        self, allocator: PageAllocator, *, schedule: ScheduleName, pass_tokens: int, compact: bool = False
    ) -> None:
        shape = allocator.shape
        if pass_tokens < max(shape.gpu_batch_size, 1):
            raise ValueError(
                f"pass_tokens must be at least the gpu batch size ({shape.gpu_batch_size}), got {pass_tokens}"
            )
        self._allocator = allocator
        self._schedule = schedule
        self._pass_tokens = pass_tokens
        self._compact = compact
        self._waiting: deque[Completion] = deque()
        self._running: list[list[Completion]] = [[] for _ in range(shape.num_gpu_batches)]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(len(batch) for batch in self._running)

    def running(self) -> Iterator[Completion]:
        """Sequences that have a slot."""
        for batch in self._running:
            yield from batch

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

    @property
    def longest_prompt(self) -> int | None:
        """Longest prompt that ever gets its turn, None for any: a piece must fit into a pass."""
        return None if self._pass_tokens >= SEGMENT_TOKENS else self._pass_tokens

    def restart(self, completion: Completion) -> None:
        """Compute a running sequence's tokens so far anew, as one prompt. It keeps its slot and its promise
        of pages."""
        assert completion.place is not None
        self._allocator.rewind(completion.place)
        completion.n_stored = 0
        completion.n_restarted = len(completion.tokens)

    def next_pass(self) -> list[list[Step]]:
        """Steps of each gpu batch (some may be empty); running sequences first, then prompts."""
        if self._schedule == "static":
            return self._next_static_pass()
        rows = self._allocator.shape.gpu_batch_size
        n_open = -(-(self.num_running + self.num_waiting) // rows) if self._compact else len(self._running)
        plan: list[list[Step]] = []
        for j, running in enumerate(self._running):
            plan.append(self._refilled(j, admits=j < n_open))
            # A batch may have slots left and no pages: what waits goes to the next one.
            if self._waiting and len(running) < rows:
                n_open += not self._allocator.has_pages(j, self._waiting[0].total_tokens)
        return plan

    def _next_static_pass(self) -> list[list[Step]]:
        if self.num_running == 0:
            for j in range(len(self._running)):
                while self._admit(j):
                    pass
        if not any(c.in_prompt for running in self._running for c in running):
            return [[Step(c, 1, False) for c in running] for running in self._running]
        plan: list[list[Step]] = []
        for running in self._running:
            room = self._pass_tokens
            steps: list[Step] = []
            for completion in running:
                if completion.in_prompt:
                    room -= self._prompt_step(completion, room, steps)
            plan.append(steps)
        return plan

    def _refilled(self, j: int, *, admits: bool) -> list[Step]:
        """The steps of gpu batch j; if it admits, waiting sequences come in while there are slots, pages and room."""
        running = self._running[j]
        decoding = [c for c in running if not c.in_prompt]
        room = self._pass_tokens - len(decoding)
        prompts: list[Step] = []
        for completion in [c for c in running if c.in_prompt]:
            if not prompts:
                room += _make_room(decoding, _least_piece(completion) - room)
            room -= self._prompt_step(completion, room, prompts)
        while self._waiting and admits:
            completion = self._waiting[0]
            short = _least_piece(completion) - room
            # A first prompt may push running sequences out of this pass, further ones may not.
            if (short > 0 and prompts) or not self._admit(j):
                break
            room += _make_room(decoding, short)
            room -= self._prompt_step(completion, room, prompts)
        return [Step(c, 1, False) for c in decoding] + prompts

    def _admit(self, j: int) -> bool:
        """Give the first waiting sequence a place in gpu batch j, if there is one."""
        if not self._waiting:
            return False
        completion = self._waiting[0]
        place = self._allocator.admit(j, completion.total_tokens)
        if place is None:
            return False
        self._waiting.popleft()
        completion.place = place
        self._running[j].append(completion)
        return True

    def _prompt_step(self, completion: Completion, room: int, steps: list[Step]) -> int:
        """Add as much of a prompt as fits into `room` tokens; returns how much."""
        n = _next_piece(completion, room)
        if n:
            steps.append(Step(completion, n, True))
        return n

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


def _next_piece(completion: Completion, room: int) -> int:
    """How much of its prompt a sequence computes within `room` tokens: all, or up to a segment's end."""
    left = completion.prefill_len - completion.n_stored
    if left <= room:
        return left
    return max(0, (completion.n_stored + room) // SEGMENT_TOKENS * SEGMENT_TOKENS - completion.n_stored)


def _least_piece(completion: Completion) -> int:
    """The smallest number of tokens by which a prompt can go on."""
    return min(completion.prefill_len - completion.n_stored, SEGMENT_TOKENS)


def _make_room(decoding: list[Completion], n_short: int) -> int:
    """Take running sequences out of the pass, the last ones first; returns the tokens gained."""
    n = max(0, min(n_short, len(decoding)))
    del decoding[len(decoding) - n :]
    return n
