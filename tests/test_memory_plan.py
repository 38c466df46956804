"""What a plan sets aside for logits: sampled rows whole, scored rows a slab of one slice at a time."""

from __future__ import annotations

import planner_cases as cases

from policy.memory_plan import ROW_CHUNK, block_sizes, work_buffer
from policy.workload import Limits, Workload, limits_for


def sizes(limits: Limits, gpu_batch_size: int = 4, num_gpu_batches: int = 3):
    return block_sizes(
        cases.model(),
        limits,
        gpu_batch_size=gpu_batch_size,
        num_gpu_batches=num_gpu_batches,
        weight_format="f16",
        cache_format="f16",
        compute_dtype="f16",
    )


def test_a_row_to_sample_is_kept_whole_a_scored_one_is_not() -> None:
    fp = cases.model()
    generating = Limits(max_tokens=64, pass_tokens=256, logit_rows=4)
    scoring = Limits(max_tokens=64, pass_tokens=256, logit_rows=256)
    kept = 3 * 4 * fp.vocab_size * 4
    assert kept <= sizes(generating).logits_bytes < kept + 3 * 4 * fp.hidden_size * 2 + 4096
    # Scoring 64 times as many rows costs their hidden states, not 64 times the vocabulary.
    assert sizes(scoring).logits_bytes - sizes(generating).logits_bytes <= 3 * 252 * fp.hidden_size * 2 + 4096


def test_a_slab_of_logits_counts_where_it_is_larger_than_a_chunk() -> None:
    fp = cases.model()
    widest = max(u.activation_elements_per_token for u in fp.units if u.rows_only)
    few, many = (Limits(max_tokens=64, pass_tokens=2048, chunk_tokens=1, logit_rows=n) for n in (8, 2048))
    small = work_buffer(fp, few, 4, "f16").activations_bytes
    large = work_buffer(fp, many, 4, "f16").activations_bytes
    assert large == ROW_CHUNK * widest * (2 + 8)  # never more rows at once than a chunk of them
    assert small <= max(8 * widest * (2 + 8), large // 8)
    wide = Limits(max_tokens=64, pass_tokens=2048, chunk_tokens=2048, logit_rows=8)
    assert work_buffer(fp, wide, 4, "f16").activations_bytes > small


def test_the_planner_does_not_charge_scoring_a_vocabulary_per_token() -> None:
    workload = Workload(prompt_len=60, gen_len=0)
    limits = limits_for(workload, gpu_batch_size=64, schedule="static")
    fp = cases.model()
    taken = sizes(limits, gpu_batch_size=64, num_gpu_batches=2).logits_bytes
    assert taken < 2 * (64 + 1) * fp.vocab_size * 4 + 2 * (limits.logit_rows or 0) * fp.hidden_size * 2 + 4096
