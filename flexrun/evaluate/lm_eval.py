"""lm-evaluation-harness on the engine: a model class for ``simple_evaluate(model=FlexrunLM(...))``.

lm-eval hands over all requests of a kind, of all tasks, in one call; here they are one job: whole blocks share
each read of the weights, whatever task they belong to. Results are kept in a journal as they land. Token
boundaries, rolling windows, truncation and stop sequences are those of lm-eval's own "hf" model.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from flexrun.chat import ChatError
from flexrun.evaluate.answers import Answering
from flexrun.evaluate.journal import open_journal
from flexrun.jobs.ids import hash64
from flexrun.jobs.kinds import EnginePrompt
from flexrun.llm import LLM
from flexrun.request import RequestError, RequestOutput, SamplingParams, unknown_option
from flexrun.scoring import ScoreWindow, rolling_windows, score_of

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

logger = logging.getLogger(__name__)

# Arguments that lm-eval or its users give to other models, without a meaning here.
_IGNORED = (
    "backend", "revision", "subfolder", "truncation", "logits_cache", "parallelize", "max_memory_per_gpu",
    "max_cpu_memory", "offload_folder", "trust_remote_code", "use_fast_tokenizer", "autogptq", "gptqmodel", "peft",
    "delta", "softmax_dtype", "tensor_parallel_size", "data_parallel_size", "gpu_memory_utilization", "swap_space",
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_WITHOUT_EFFECT = ("do_sample", "use_cache", "num_beams", "max_length", "early_stopping", "pad_token_id")


class FlexrunLM(TemplateLM):
    """A model for lm-evaluation-harness.

    Args:
        model: an LLM that is open already (and stays the caller's to close), or what LLM takes as its model;
            `pretrained` is another name for it.
        batch_size, max_batch_size: taken for compatibility and not used, the engine plans its blocks.
        device: as for LLM; a device that this machine lacks ("cuda:0" is lm-eval's habit) means "auto".
        journal: a file that keeps results, so that a killed evaluation goes on; "auto" is one in the cache
            folder; None keeps none.
        max_length: most tokens a request sees, at most the model's length.
        max_gen_toks: tokens to generate where a task says nothing.
        add_bos_token: True or False overrides whether prompts begin with BOS.
        prefix_token_id: stands for an empty context (default: BOS, else EOS).
        chat_template_args: variables for the chat template, such as enable_thinking.
        options: everything else that LLM takes.
    """

    def __init__(
        self,
        model: LLM | str | os.PathLike[str] | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | str | None = None,
        device: str | None = None,
        journal: str | os.PathLike[str] | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        model = model if model is not None else pretrained
        if model is None:
            raise ValueError("give the model: FlexrunLM(model) or model_args pretrained=MODEL")
        self._owned = not isinstance(model, LLM)
        if isinstance(model, LLM):
            self.llm = model
        else:
            self.llm = LLM(os.fspath(model), device=usable_device(device), **_llm_options(options))
        if self.llm.tokenizer is None:
            raise ValueError(f"{self.llm.opened.name} has no tokenizer, which evaluation needs")
        self._text_tokenizer = self.llm.tokenizer
        self.max_length = min(self.llm.max_model_len, int(max_length or self.llm.max_model_len))
        self.max_gen_toks = int(max_gen_toks)
        self._add_bos_token = add_bos_token
        self._prefix_token_id = None if prefix_token_id is None else int(prefix_token_id)
        self._chat_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._chat_args["enable_thinking"] = enable_thinking
        self._journal = open_journal(journal, self.llm)
        self._answering = Answering(self.llm.engine, self._journal)

    @property
    def n_computed(self) -> int:
        """Engine requests run so far; the others came from the journal or were asked before."""
        return self._answering.n_computed

    # -- what lm-eval asks about the model -----------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        ids = self._text_tokenizer.eos_token_ids or self.llm.config.eos_token_ids
        return ids[0] if ids else self.llm.scorer.start_token_id

    @property
    def prefix_token_id(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        return self.llm.scorer.start_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.opened.name).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval keeps beside its results."""
        return {
            "model_dtype": str(self.llm.runtime.executor.compute_dtype),
            "model_fingerprint": self.llm.opened.fingerprint,
            "weight_format": self.llm.policy.weight_format,
            "cache_format": self.llm.policy.cache_format,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; the tokenizer's own BOS unless told otherwise, and never twice."""
        if add_special_tokens is None:
            add_special_tokens = self._add_bos_token
            if string.startswith(self.tok_decode([self.prefix_token_id]) or "\0"):
                add_special_tokens = False
        if add_special_tokens and not self._text_tokenizer.adds_bos:
            bos = self._text_tokenizer.bos_token_id
            plain = self._text_tokenizer.encode(string, add_special_tokens=False)
            return plain if bos is None or not self._add_bos_token else [bos, *plain]
        return self._text_tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)

    def tok_decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special ones included."""
        return self._text_tokenizer.decode(list(tokens), skip_special_tokens=False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text where lm-eval is to use one; only the model's own can be asked for."""
        if chat_template is False or chat_template is None:
            return None
        if isinstance(chat_template, str) and chat_template != "default":
            raise ValueError(f"the model's own chat template is the only one, got {chat_template!r}")
        return None if self.llm.chat_template is None else self.llm.chat_template.source

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt of a conversation. Without a generation prompt its last message is left open.

        A template that refuses a system message gets the conversation without it. Raises ChatError.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except ChatError:
            rest = [message for message in chat_history if message.get("role") != "system"]
            if len(rest) == len(chat_history) or not rest:
                raise
            logger.warning("the chat template refused the messages; trying without the system message")
            return self._render(rest, add_generation_prompt)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        template = self.llm.chat_template
        if template is None:
            raise ChatError("the model has no chat template; leave --apply_chat_template out")
        text = template.render(messages, add_generation_prompt=add_generation_prompt, **self._chat_args)
        if add_generation_prompt:
            return text
        last = messages[-1]["content"]
        start = text.rfind(last.strip())
        if start < 0:
            raise ChatError("the chat template changes the last message, so it cannot be continued")
        whole = text.startswith(last.lstrip(), start)
        return text[: start + len(last.lstrip() if whole else last.strip())]

    # -- requests ------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        items: list[list[ScoreWindow]] = []
        for (_, continuation), context_ids, continuation_ids in requests:
            items.append(
                [self._window(context_ids, continuation_ids, continuation)] if continuation_ids else []
            )
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for i, values in self._scored(items, "loglikelihood requests", disable_tqdm):
            results[i] = (sum(v[0] for v in values), all(v[1] for v in values))
            self.cache_hook.add_partial("loglikelihood", requests[i][0], results[i])
        return results

    def _window(self, context_ids: list[int], continuation_ids: list[int], text: str) -> ScoreWindow:
        context = context_ids or [self.prefix_token_id]
        if len(continuation_ids) > self.max_length:
            raise RequestError(
                f"a continuation has {len(continuation_ids)} tokens, the limit is {self.max_length}: {text[:80]!r}"
            )
        tokens = (context + continuation_ids)[-(self.max_length + 1) :]
        return ScoreWindow(token_ids=tokens, score_from=len(tokens) - len(continuation_ids))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each token predicted once in windows of max_length."""
        items = [
            rolling_windows(self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length)
            for request in requests
        ]
        results = [0.0] * len(requests)
        for i, values in self._scored(items, "rolling requests", disable_tqdm):
            results[i] = sum(value[0] for value in values)
            self.cache_hook.add_partial("loglikelihood_rolling", requests[i].args, results[i])
        return results

    def _scored(
        self, items: Sequence[Sequence[ScoreWindow]], what: str, quiet: bool
    ) -> Iterator[tuple[int, list[tuple[float, bool]]]]:
        """(item, log-probability and is_greedy of each of its windows) as they land."""

        def value(prompt: EnginePrompt, output: RequestOutput) -> list[Any]:
            assert prompt.score_from is not None
            window = ScoreWindow(token_ids=prompt.token_ids, score_from=prompt.score_from)
            score = score_of([window], [output])
            return [score.logprob, score.is_greedy]

        prompts = [[window.prompt() for window in windows] for windows in items]
        for i, values in self._answers(prompts, value, what, quiet):
            yield i, [(float(v[0]), bool(v[1])) for v in values]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop sequences, which is cut off."""
        repeats: Counter[str] = Counter()
        prompts = []
        for request in requests:
            context, gen_kwargs = request.args
            occurrence = repeats[repr((context, gen_kwargs))]
            repeats[repr((context, gen_kwargs))] += 1
            prompts.append([self._generation(context, gen_kwargs, occurrence)])
        results = [""] * len(requests)

        def text(prompt: EnginePrompt, output: RequestOutput) -> str:
            return output.outputs[0].text

        for i, values in self._answers(prompts, text, "generate_until requests", disable_tqdm):
            results[i] = values[0]
            self.cache_hook.add_partial("generate_until", requests[i].args, results[i])
        return results

    def _generation(self, context: str, gen_kwargs: dict[str, Any], occurrence: int) -> EnginePrompt:
        kwargs = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        eos = self.tok_decode([self.eot_token_id])
        stop = [text for text in handle_stop_sequences(kwargs.pop("until", None), eos=eos) if text]
        max_tokens = int(kwargs.pop("max_gen_toks"))
        room = self.max_length - max_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks {max_tokens} leaves no room for a prompt in {self.max_length} tokens; lower it"
                " (--gen_kwargs max_gen_toks=N)"
            )
        options = {name: kwargs.pop(name) for name in _SAMPLING if kwargs.get(name) is not None}
        unknown = sorted(name for name in kwargs if name not in (*_WITHOUT_EFFECT, *_SAMPLING))
        if unknown:
            _warn_once(f"generation arguments without effect here: {', '.join(unknown)}")
        options.setdefault("temperature", 0.0)
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        if options["temperature"] and "seed" not in options:
            # The same draw in a run that is started again, another one for each repeat.
            options["seed"] = hash64(f"{occurrence}\0{ids}".encode()) >> 1
        params = SamplingParams(max_tokens=max_tokens, stop=stop, **options)
        return EnginePrompt(token_ids=ids, params=params, text=context)

    def _answers(
        self,
        items: Sequence[Sequence[EnginePrompt]],
        value_of: Callable[[EnginePrompt, RequestOutput], Any],
        what: str,
        quiet: bool,
    ) -> Iterator[tuple[int, list[Any]]]:
        with tqdm(desc=what, disable=quiet) as bar:

            def progress(n_done: int, n_total: int) -> None:
                bar.total, bar.n = n_total, n_done
                bar.refresh()

            yield from self._answering.run(items, value_of, progress=progress)

    def close(self) -> None:
        """Close the journal, and the LLM if it was opened here."""
        self._journal.close()
        if self._owned:
            self.llm.close()


def usable_device(name: str | None) -> str:
    """`name`, or "auto" where this machine has no such device or nothing was asked for."""
    from offload.device import make_device

    if name in (None, "", "auto"):
        return "auto"
    try:
        make_device(str(name))
    except (ValueError, RuntimeError) as error:
        logger.warning("device %s cannot be used here (%s): choosing one", name, error)
        return "auto"
    return str(name)


def _llm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options for LLM; those of other model classes are left out, unknown ones refused (ValueError)."""
    known = inspect.signature(LLM.__init__).parameters
    result: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            result[name] = value
        elif name in _IGNORED:
            logger.warning("model argument %s has no effect here", name)
        else:
            raise ValueError(unknown_option(name, [n for n in known if n != "self"], "model argument"))
    return result


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)
