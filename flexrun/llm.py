"""The Python API: a model by name, prompts in, texts out. Names follow vLLM's offline classes."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from flexrun.chat import ChatTemplate, encode_chat
from flexrun.checkpoint.open_model import OpenedModel, Source, open_model
from flexrun.checkpoint.packed import PackedSource
from flexrun.checkpoint.packing import cached_pack
from flexrun.defaults import MAX_MODEL_LEN, Wish, default_policy
from flexrun.engine import Engine
from flexrun.request import RequestError, RequestOutput, SamplingParams
from flexrun.runtime import DTYPE_NAMES, Runtime, layout_footprint
from flexrun.scoring import Score, Scorer, ScoreWindow, TextOrIds, run_prompts, score_of
from flexrun.tokenizer import Tokenizer
from offload.budgets import choose_budgets
from offload.device import Device, make_device
from offload.host import format_bytes, host_memory, parse_bytes
from offload.memory import TierBudgets
from offload.trace import Trace
from policy.hardware import Hardware
from policy.tiers import Placement, Policy, ScheduleName
from policy.workload import Workload
from quant.formats import parse_format
from quant.linear import packed_row_len

if TYPE_CHECKING:
    from policy.search import SearchResult

logger = logging.getLogger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A language model, placed and ready.

    Args:
        model: a folder, a .gguf file, a packed folder, org/name in the local Hugging Face cache, or a preset
            with dummy_weights=True.
        device: "auto", "cpu", "cuda", ...; with gpu_mem on a CPU the gpu tier is emulated.
        dtype: precision of the computation: "auto", "float32", "bfloat16" or "float16".
        weight_format, cache_format: as stored in the checkpoint and in the compute type by default; names
            as in quant.formats and quant.kv_formats. Nothing is quantised unless asked for.
        policy: a Policy; "auto": the planner's choice for this machine's profile (measured first if there is
            none); "default": the safe built-in choice; None: the planner's where a profile is at hand and the
            work is known, else the built-in one. The single fields (weights, cache, activations,
            gpu_batch_size, ...) fix parts of it. `search` then holds what the planner found, None without it.
        workload: what there is to do, for the planner; prompt_len, gen_len and num_requests are its short form.
        gpu_mem, cpu_mem, disk_mem: budgets ("12GiB", "80%", bytes). disk_dir: folder for spill files.
        max_model_len: most tokens of a sequence, at most the model's positions; by default those, up to 32,768 or the
            longest that the workload knows of.
        prompt_len, gen_len, num_requests: what is known of the work; sizes the block.
    Raises ValueError (CheckpointError, MemoryBudgetError and others derive from it or OSError) with the remedy.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        tokenizer: Tokenizer | str | Path | None = None,
        weight_format: str = "auto",
        cache_format: str = "auto",
        policy: Policy | str | None = None,
        workload: Workload | None = None,
        weights: Placement | None = None,
        cache: Placement | None = None,
        activations: Placement | None = None,
        gpu_batch_size: int | None = None,
        num_gpu_batches: int | None = None,
        cpu_attention_frac: float = 0.0,
        overlap: bool = True,
        schedule: ScheduleName | None = None,
        gpu_mem: str | int | None = None,
        cpu_mem: str | int | None = None,
        disk_mem: str | int | None = None,
        disk_dir: str | Path | None = None,
        max_model_len: int | None = None,
        prompt_len: int | None = None,
        gen_len: int | None = None,
        num_requests: int | None = None,
        pass_tokens: int | None = None,
        page_tokens: int = 64,
        dummy_weights: bool = False,
        seed: int = 0,
        trace: Trace | None = None,
    ) -> None:
        if isinstance(policy, str) and policy not in ("auto", "default"):
            raise ValueError(f'policy must be a Policy, "auto", "default" or None, got {policy!r}')
        if isinstance(policy, Policy):
            weight_format = policy.weight_format if weight_format == "auto" else weight_format
            cache_format = policy.cache_format if cache_format == "auto" else cache_format
        folder = Path(disk_dir) if disk_dir is not None else default_disk_dir()
        self.device, budgets, notes = _device_and_budgets(device, gpu_mem, cpu_mem, disk_mem, folder)
        compute_dtype = self.device.compute_dtype(dtype)
        opened = open_model(str(model), weight_format=weight_format, dummy_weights=dummy_weights, seed=seed)
        self.opened: OpenedModel = opened
        self.config = opened.config
        self.notes: list[str] = [*self.device.notes, *notes, *opened.notes]
        self.tokenizer = _tokenizer(tokenizer, opened)
        self.chat_template: ChatTemplate | None = opened.load_chat_template(self.tokenizer)
        limit = opened.model.max_positions
        reason = "positions of the model"
        if max_model_len is not None:
            if max_model_len > limit:
                raise ValueError(f"max_model_len {max_model_len} is beyond the model's {limit} positions")
            limit, reason = max_model_len, "tokens set by --max-model-len"
        else:
            known = workload.max_tokens if workload is not None else (prompt_len or 0) + (gen_len or 0)
            wanted = max(MAX_MODEL_LEN, known)
            if wanted < limit:
                self.notes.append(
                    f"sequences, and windows of long texts, end at {wanted:,} of the model's {limit:,} positions; "
                    "--max-model-len admits longer ones"
                )
                limit, reason = wanted, "tokens that are admitted unless --max-model-len says more"
        footprint = layout_footprint(opened.model, opened.source, opened.name)
        wish = Wish(
            weights=weights,
            cache=cache,
            activations=activations,
            gpu_batch_size=gpu_batch_size,
            num_gpu_batches=num_gpu_batches,
            cache_format=cache_format,
            cpu_attention_frac=cpu_attention_frac,
            overlap=overlap,
            schedule=schedule or "refill",
        )
        if isinstance(policy, Policy):
            wish = Wish(
                weights=policy.weights,
                cache=policy.cache,
                activations=policy.activations,
                gpu_batch_size=policy.gpu_batch_size,
                num_gpu_batches=policy.num_gpu_batches,
                cache_format=cache_format,
                cpu_attention_frac=policy.cpu_attention_frac,
                overlap=policy.overlap,
                schedule=policy.schedule,
            )
        compute = DTYPE_NAMES[compute_dtype]
        row_len = packed_row_len(compute_dtype, self.device.torch_device.type)
        if workload is None and prompt_len is not None and gen_len is not None:
            workload = Workload(prompt_len=prompt_len, gen_len=gen_len, num_requests=num_requests)
        self.search: SearchResult | None = None
        hardware = None
        placed = wish.weights or wish.cache or wish.activations or wish.cpu_attention_frac
        planned = policy in (None, "auto") and not placed and pass_tokens is None
        if workload is not None and planned:
            if policy == "auto" or find_spec("pulp") is not None:
                hardware = _hardware(self.device, folder, measure=policy == "auto")
            else:
                self.notes.append("pulp is not installed: the built-in placement is used, not the planner's")
        if hardware is not None and workload is not None:
            from flexrun.planning import plan_run

            exact = prompt_len is not None
            chosen, limits, self.search = plan_run(
                footprint,
                hardware,
                workload,
                budgets=budgets,
                first_tier=self.device.first_tier,
                compute_dtype=compute,
                cache_format=cache_format,
                gpu_batch_size=gpu_batch_size,
                num_gpu_batches=num_gpu_batches,
                overlap=overlap,
                schedule=schedule,
                max_model_len=None if exact else limit,
                page_tokens=page_tokens,
                packed_row_len=row_len,
            )
            if limits.max_tokens < limit:
                if not exact:
                    self.notes.append(
                        f"sequences, and windows of long texts, end at {limits.max_tokens:,} tokens instead of "
                        f"{limit:,}: there is no memory for one that is longer; with more there is"
                    )
                limit, reason = limits.max_tokens, "tokens that there is memory for"
        else:
            chosen, limits = default_policy(
                footprint,
                wish,
                budgets=budgets,
                first_tier=self.device.first_tier,
                compute_dtype=compute,
                max_model_len=limit,
                prompt_len=prompt_len,
                gen_len=gen_len,
                num_requests=num_requests,
                page_tokens=page_tokens,
                pass_tokens=pass_tokens,
                packed_row_len=row_len,
            )
        self.policy = replace(chosen, weight_format=weight_format)
        source = self._stored_source(opened, weight_format, folder, dummy=dummy_weights)
        self.runtime = Runtime(
            opened.model,
            source,
            name=opened.name,
            policy=self.policy,
            limits=limits,
            device=self.device,
            compute_dtype=compute_dtype,
            budgets=budgets,
            disk_dir=folder,
            len_limit_reason=reason,
            trace=trace,
        )
        self.notes += self.runtime.notes()
        eos = self.tokenizer.eos_token_ids if self.tokenizer is not None else ()
        self.engine = Engine(
            self.runtime, tokenizer=self.tokenizer, eos_token_ids=(*eos, *self.config.eos_token_ids)
        )
        self.scorer = Scorer(
            self.tokenizer, eos_token_ids=self.config.eos_token_ids, max_len=self.engine.max_model_len
        )
        self._ids = itertools.count()

    def _stored_source(self, opened: OpenedModel, weight_format: str, folder: Path, *, dummy: bool) -> Source:
        """Where the weights are read from: the checkpoint, or a packed copy in the cache folder, made once.

        A copy is needed to stream units that are not stored as they are used, and saves quantising again at every
        start where another packed format was asked for.
        """
        source = opened.source
        if isinstance(source, PackedSource):
            return source
        streams = self.policy.weights.disk_frac > 0 and not _streams_as_it_is(opened)
        quantised = not dummy and weight_format != "auto" and not parse_format(weight_format).is_plain
        if not streams and not quantised:
            return source
        cache = folder.parent if folder == default_disk_dir() else folder
        packed = cached_pack(source, opened.model, cache / "packed", name=opened.name)
        made = ", made earlier" if packed.reused else ""
        self.notes.append(f"weights from the packed copy {packed.path} ({format_bytes(packed.nbytes)}{made})")
        return PackedSource(packed.path)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and answer together."""
        return self.engine.max_model_len

    # -- use ---------------------------------------------------------------------------------------------

    def encode(self, prompt: Prompt) -> tuple[list[int], str | None]:
        """Token ids of a prompt (text, ids, or {"prompt": ...} / {"prompt_token_ids": [...]}) and its text.

        Raises RequestError.
        """
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                ids, text = self.encode(prompt["prompt_token_ids"])
                given = prompt.get("prompt")
                return ids, given if isinstance(given, str) else text
            if "prompt" in prompt:
                return self.encode(prompt["prompt"])
            raise RequestError(
                f"a prompt object needs prompt or prompt_token_ids, found {sorted(map(str, prompt))}"
            )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this model folder has no tokenizer, so prompts must be token ids; got text. "
                    "Add tokenizer.json to the folder to use text"
                )
            return self.tokenizer.encode(prompt), prompt
        ids = list(prompt)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise RequestError("a prompt given as a list must hold token ids (whole numbers) only")
        return ids, None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, in order. One SamplingParams for all, or one per prompt.

        A list of ints is one prompt; a list of anything else is several. Raises RequestError for a prompt
        that can never run, before anything runs.
        """
        many = _as_list(prompts)
        return self._run([self.encode(prompt) for prompt in many], sampling_params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or several."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [self.encode_chat(m, add_generation_prompt=add_generation_prompt) for m in conversations]
        return self._run(prompts, sampling_params)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> tuple[list[int], str]:
        """Token ids and text of a conversation by the model's chat template. Raises ChatError."""
        text, ids = encode_chat(
            self.tokenizer, self.chat_template, messages, add_generation_prompt=add_generation_prompt
        )
        return ids, text

    def score(self, pairs: Sequence[tuple[TextOrIds, TextOrIds]]) -> list[Score]:
        """Log-likelihood of each continuation given its context (text or token ids), in order.

        An empty context is replaced by the model's BOS (or EOS) token; a context beyond the model's length
        loses its beginning. Raises RequestError.
        """
        return self._score([[self.scorer.pair(*pair)] for pair in pairs])

    def score_text(self, texts: Sequence[TextOrIds]) -> list[Score]:
        """Log-likelihood of whole texts of any length (token ids too), in windows of max_model_len, in order.

        Raises RequestError.
        """
        return self._score([self.scorer.text(text) for text in texts])

    def _score(self, items: Sequence[Sequence[ScoreWindow]]) -> list[Score]:
        work = ((i, [window.prompt() for window in windows]) for i, windows in enumerate(items))
        done: dict[int, Score] = {}
        for i, outputs in run_prompts(self.engine, work, name=f"score-{next(self._ids)}"):
            done[i] = score_of(items[i], outputs)
        return [done[i] for i in range(len(items))]

    def _run(
        self,
        prompts: Sequence[tuple[list[int], str | None]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            params = [sampling_params or SamplingParams()] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(
                    f"{len(prompts)} prompts need as many SamplingParams or one, got {len(params)}"
                )
        names: list[str] = []
        try:
            for (ids, text), param in zip(prompts, params, strict=True):
                name = f"request-{next(self._ids)}"
                self.engine.add_request(name, ids, param, text)
                names.append(name)
        except ValueError:
            for name in names:
                self.engine.abort(name)
            raise
        done = self._drain(names)
        return [done[name] for name in names]

    def _drain(self, names: Sequence[str]) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        while len(done) < len(names):
            for output in self.engine.step():
                done[output.request_id] = output
        return done

    def close(self) -> None:
        """Let go of memory, threads and spill files."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def _streams_as_it_is(opened: OpenedModel) -> bool:
    """Whether every unit's bytes lie in a file in the form in which they are used."""
    return all(opened.source.extents(unit) is not None for unit in opened.model.units if not unit.pinned)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _tokenizer(given: Tokenizer | str | Path | None, opened: OpenedModel) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        from flexrun.tokenizer import load_tokenizer

        return load_tokenizer(given)
    return opened.load_tokenizer()


def _device_and_budgets(
    name: str,
    gpu_mem: str | int | None,
    cpu_mem: str | int | None,
    disk_mem: str | int | None,
    disk_dir: Path,
) -> tuple[Device, TierBudgets, tuple[str, ...]]:
    """The device and what may be used of each tier; disk space is that of disk_dir's file system."""
    gpu_bytes = None
    if gpu_mem is not None:
        total = host_memory().total_bytes
        if name != "cpu" and torch.accelerator.is_available():
            memory = make_device(name).gpu_memory()
            total = memory[1] if memory else total
        gpu_bytes = parse_bytes(gpu_mem, total_bytes=total, what="--gpu-mem")
    device = make_device(name, gpu_bytes)
    existing = disk_dir
    while not existing.exists():
        existing = existing.parent
    budgets, notes = choose_budgets(device, cpu_mem=cpu_mem, disk_mem=disk_mem, disk_dir=existing)
    return device, budgets, notes


def _hardware(device: Device, folder: Path, *, measure: bool) -> Hardware | None:
    """This machine's profile; None if there is none yet and it is not to be measured now."""
    from flexrun.probe import machine_profile
    from offload.measure import cache_file

    if not measure and not cache_file(device).is_file():
        return None
    return machine_profile(device, folder=folder, say=lambda text: logger.info("measuring %s", text))


def default_disk_dir() -> Path:
    """Where spill files go if nothing is said: the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexrun" / "spill"


__all__ = ["LLM", "Prompt", "Score"]
