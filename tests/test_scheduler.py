"""Who runs next: order, room, pages, progress; on the allocator alone, without a model."""

from __future__ import annotations

import random

import pytest

from flexrun.request import SamplingParams
from flexrun.sampling import SamplingState
from flexrun.scheduler import Completion, Scheduler, Step
from offload.pages import SEGMENT_TOKENS, CacheShape, PageAllocator
from policy.tiers import ScheduleName
from quant.kv_formats import parse_cache_format

PAGE = 16


def make(
    *,
    rows: int = 2,
    batches: int = 1,
    slots: int = 100,
    pass_tokens: int = 512,
    schedule: ScheduleName = "refill",
    compact: bool = False,
) -> tuple[Scheduler, PageAllocator]:
    import torch

    shape = CacheShape(
        n_layers=1,
        num_gpu_batches=batches,
        gpu_batch_size=rows,
        n_kv_heads=1,
        head_dim=8,
        page_counts=(0, slots, 0),
        fmt=parse_cache_format("f32"),
        tail_dtype=torch.float32,
        page_tokens=PAGE,
    )
    allocator = PageAllocator(shape)
    scheduler = Scheduler(allocator, schedule=schedule, pass_tokens=pass_tokens, compact=compact)
    return scheduler, allocator


def completion(name: str, prompt_len: int, max_tokens: int = 1, index: int = 0) -> Completion:
    params = SamplingParams(max_tokens=max(1, max_tokens))
    prompt = [1] * prompt_len
    return Completion(
        request_id=name,
        index=index,
        prompt=prompt,
        known=prompt,
        params=params,
        max_tokens=max_tokens,
        sampling=SamplingState(params, vocab_size=8),
        detokenizer=None,
    )


def advance(scheduler: Scheduler, allocator: PageAllocator, plan: list[list[Step]]) -> list[str]:
    """Pretend the pass ran: pages fill, tokens appear; the names that finished."""
    ended = []
    for steps in plan:
        for step in steps:
            c, samples = step.completion, step.samples
            done = step.ends_prompt or not step.in_prompt
            assert c.place is not None
            for position in range(c.n_stored, c.n_stored + step.n_tokens):
                if (position + 1) % PAGE == 0:
                    allocator.take_page(c.place)
            c.n_stored += step.n_tokens
            c.place.length = c.n_stored
            if samples:
                c.tokens.append(0)
            if done and len(c.tokens) >= c.max_tokens:
                scheduler.finish(c)
                ended.append(c.request_id)
    return ended


def named(plan: list[list[Step]]) -> list[list[tuple[str, int]]]:
    return [[(s.completion.request_id, s.n_tokens) for s in steps] for steps in plan]


def test_refill_puts_a_waiting_sequence_into_a_freed_slot_in_the_next_pass() -> None:
    scheduler, allocator = make()
    for name, n in (("a", 1), ("b", 3), ("c", 2)):
        scheduler.add(completion(name, 5, n))
    plan = scheduler.next_pass()
    assert named(plan) == [[("a", 5), ("b", 5)]]
    assert advance(scheduler, allocator, plan) == ["a"]
    assert scheduler.num_running == 1
    plan = scheduler.next_pass()
    assert named(plan) == [[("b", 1), ("c", 5)]]


def test_static_waits_for_the_whole_block_and_computes_all_prompts_first() -> None:
    scheduler, allocator = make(rows=2, batches=1, pass_tokens=256, schedule="static")
    for name, prompt_len, n in (("a", 200, 2), ("b", 100, 3), ("c", 5, 1)):
        scheduler.add(completion(name, prompt_len, n))
    seen = []
    while scheduler.num_waiting or scheduler.num_running:
        plan = scheduler.next_pass()
        seen.append(named(plan)[0])
        advance(scheduler, allocator, plan)
    assert seen == [
        [("a", 200)],
        [("b", 100)],
        [("a", 1), ("b", 1)],
        [("b", 1)],
        [("c", 5)],
    ]


def test_long_prompts_are_cut_at_segments_and_never_starve() -> None:
    scheduler, allocator = make(rows=3, pass_tokens=SEGMENT_TOKENS)
    for name in ("a", "b"):
        scheduler.add(completion(name, 4, 50))
    advance(scheduler, allocator, scheduler.next_pass())
    scheduler.add(completion("long", SEGMENT_TOKENS + 30, 2))
    plan = scheduler.next_pass()
    # A whole segment needs the whole pass: the running sequences sit out once, then all go on together.
    assert named(plan) == [[("long", SEGMENT_TOKENS)]]
    advance(scheduler, allocator, plan)
    assert named(scheduler.next_pass()) == [[("a", 1), ("b", 1), ("long", 30)]]


def test_a_second_long_prompt_does_not_push_running_sequences_out() -> None:
    scheduler, allocator = make(rows=4, pass_tokens=SEGMENT_TOKENS + 2)
    scheduler.add(completion("a", 4, 50))
    advance(scheduler, allocator, scheduler.next_pass())
    scheduler.add(completion("long", SEGMENT_TOKENS, 2))
    scheduler.add(completion("other", SEGMENT_TOKENS, 2))
    assert named(scheduler.next_pass()) == [[("a", 1), ("long", SEGMENT_TOKENS)]]


def test_pages_are_promised_for_the_whole_answer_and_the_order_is_kept() -> None:
    # 4 slots: "big" needs 3, "next" 2. A small one behind "next" must not overtake it.
    scheduler, allocator = make(rows=4, slots=4)
    scheduler.add(completion("big", 2 * PAGE, PAGE + 1))
    scheduler.add(completion("next", 2 * PAGE, 1))
    scheduler.add(completion("small", 3, 1))
    plan = scheduler.next_pass()
    assert named(plan) == [[("big", 2 * PAGE)]]
    while "big" not in advance(scheduler, allocator, plan):
        plan = scheduler.next_pass()
        assert named(plan) == [[("big", 1)]]
    assert named(scheduler.next_pass()) == [[("next", 2 * PAGE), ("small", 3)]]


def test_a_request_that_fits_another_gpu_batch_goes_there() -> None:
    scheduler, _ = make(rows=2, batches=2, slots=2)
    scheduler.add(completion("a", 2 * PAGE, 1))
    scheduler.add(completion("b", 2 * PAGE, 1))
    assert named(scheduler.next_pass()) == [[("a", 2 * PAGE)], [("b", 2 * PAGE)]]


def test_remove_gives_back_rows_and_pages() -> None:
    scheduler, allocator = make(rows=1, slots=2)
    scheduler.add(completion("a", 2 * PAGE, 5))
    scheduler.add(completion("b", 2 * PAGE, 1))
    advance(scheduler, allocator, scheduler.next_pass())
    scheduler.remove("a")
    assert named(scheduler.next_pass()) == [[("b", 2 * PAGE)]]
    scheduler.remove("b")
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert allocator.admit(0, 2 * PAGE) is not None


def test_a_restarted_sequence_is_a_prompt_again_and_keeps_its_pages() -> None:
    scheduler, allocator = make(rows=1, slots=3)
    c = completion("a", PAGE + 2, 20)
    scheduler.add(c)
    for _ in range(4):
        advance(scheduler, allocator, scheduler.next_pass())
    assert len(c.tokens) == 4
    c.tokens[:] = [10, 11, 12, 13]
    scheduler.restart(c)
    plan = scheduler.next_pass()
    assert named(plan) == [[("a", PAGE + 6)]] and plan[0][0].ends_prompt
    assert c.token_ids(PAGE, PAGE + 6) == [1, 1, 10, 11, 12, 13]
    assert c.token_ids(PAGE + 3, PAGE + 5) == [11, 12]
    for _ in range(16):
        assert scheduler.num_running == 1
        advance(scheduler, allocator, scheduler.next_pass())
    assert scheduler.num_running == 0


def test_is_last_only_when_nothing_can_be_left() -> None:
    scheduler, allocator = make(rows=2)
    scheduler.add(completion("a", 3, 1))
    scheduler.add(completion("b", 3, 2))
    plan = scheduler.next_pass()
    assert not scheduler.is_last(plan)
    advance(scheduler, allocator, plan)
    assert scheduler.is_last(scheduler.next_pass())
    scheduler.add(completion("c", 3, 1))
    assert not scheduler.is_last([])


@pytest.mark.parametrize("schedule", ["refill", "static"])
@pytest.mark.parametrize("seed", range(6))
def test_random_loads_finish_within_their_limits(seed: int, schedule: ScheduleName) -> None:
    rng = random.Random(seed)
    rows, batches, slots = rng.randint(1, 4), rng.randint(1, 3), rng.randint(44, 60)
    pass_tokens = SEGMENT_TOKENS + rng.randint(0, 300)
    scheduler, allocator = make(
        rows=rows, batches=batches, slots=slots, pass_tokens=pass_tokens, schedule=schedule
    )
    names = [str(i) for i in range(25)]
    for name in names:
        scheduler.add(completion(name, rng.choice([1, 15, 16, 17, 256, 300, 600]), rng.randint(0, 40)))
    ended: list[str] = []
    for _ in range(3000):
        if not (scheduler.num_waiting or scheduler.num_running):
            break
        plan = scheduler.next_pass()
        assert any(plan), "a pass without work"
        for steps in plan:
            assert sum(step.n_tokens for step in steps) <= pass_tokens
            assert len({id(step.completion) for step in steps}) == len(steps) <= rows
            for step in steps:
                cut = step.completion.n_stored + step.n_tokens
                assert not step.in_prompt or step.ends_prompt or cut % SEGMENT_TOKENS == 0
        ended += advance(scheduler, allocator, plan)
    assert sorted(ended, key=int) == names


def test_a_pass_must_hold_one_token_of_every_row() -> None:
    with pytest.raises(ValueError, match=r"gpu batch size \(8\), got 7"):
        make(rows=8, pass_tokens=7)


@pytest.mark.parametrize(("compact", "wanted"), [(True, [6, 4, 0, 0]), (False, [4, 4, 2, 0])])
def test_few_sequences_share_few_gpu_batches_where_no_weights_are_streamed(compact, wanted):
    """Four prompts of 100 tokens fit into a pass of a gpu batch."""
    scheduler, allocator = make(rows=8, batches=4, pass_tokens=440, compact=compact)
    for i in range(10):
        scheduler.add(completion(str(i), 100, max_tokens=50))
    for _ in range(4):
        advance(scheduler, allocator, scheduler.next_pass())
    assert [sum(c.place.batch == j for c in scheduler.running()) for j in range(4)] == wanted
    assert scheduler.num_waiting == 0


def test_compact_sequences_move_on_where_a_batch_lacks_pages():
    scheduler, allocator = make(rows=8, batches=2, slots=20, pass_tokens=512, compact=True)
    for i in range(6):
        scheduler.add(completion(str(i), 4 * PAGE, max_tokens=2))
    plan = scheduler.next_pass()
    assert all(plan), "both gpu batches have pages for some"


def test_a_compact_block_is_filled_where_there_is_enough_to_do():
    scheduler, _ = make(rows=4, batches=3, pass_tokens=64, compact=True)
    for i in range(100):
        scheduler.add(completion(str(i), 8, max_tokens=50))
    assert [len(steps) for steps in scheduler.next_pass()] == [4, 4, 4]
