"""``flexrun generate``: one prompt, its answer written to standard output as it grows."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from flexrun.cli.exits import EXIT_INTERRUPTED, EXIT_OK, UsageError
from flexrun.cli.flags import (
    add_model_flags,
    add_policy_flags,
    add_sampling_flags,
    sampling_options,
    wants_plan,
)
from flexrun.cli.session import Texts, choose_formats, load_llm, measured, open_texts, resolve
from flexrun.report import format_seconds, peak_rss_bytes
from flexrun.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from flexrun.llm import LLM

_REQUEST_ID = "generate"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt",
        description="Completes one prompt and writes the text to standard output as it grows.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads standard input")
    parser.add_argument("--chat", action="store_true", help="put the prompt to the model as a user's message")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it (implies --chat)")
    parser.add_argument(
        "--token-ids", action="store_true", help="the prompt is token ids, such as 1,15043,29892"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object instead")
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_policy_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model, run the one request."""
    options = {"seed": args.seed, **sampling_options(args)}
    params = SamplingParams.from_dict(options)
    if params.n > 1 and not args.json:
        raise UsageError(f"n is {params.n}, but one text is written; add --json for several answers")
    resolve(args)
    prompt = args.prompt if args.prompt not in (None, "-") else sys.stdin.read()
    llm = load_llm(args, **_prepared(args, prompt, params))
    try:
        text, token_ids = _encode(llm, args, prompt)
        llm.engine.add_request(_REQUEST_ID, token_ids, params, text)
        started = time.monotonic()
        try:
            output = _stream(llm, write=not args.json)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return EXIT_INTERRUPTED
        seconds = time.monotonic() - started
    finally:
        llm.close()
    if args.json:
        print(json.dumps(_as_dict(output, seconds), ensure_ascii=False))
    n_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    print(
        f"[{len(output.prompt_token_ids)} prompt tokens, {n_tokens} generated in {format_seconds(seconds)}:"
        f" {n_tokens / max(seconds, 1e-9):,.1f} tokens/s]",
        file=sys.stderr,
    )
    return EXIT_OK


def _prepared(args: argparse.Namespace, prompt: str, params: SamplingParams) -> dict[str, Any]:
    """The one request's lengths, where there is a profile to plan with; formats that are auto are settled."""
    auto = "auto" in (args.weight_format, args.cache_format)
    if not auto and not (wants_plan(args) and measured(args)):
        return {}
    from flexrun.jobs.sample import OPEN_ANSWER_TOKENS
    from policy.workload import Workload

    texts = open_texts(args)
    # Without a tokenizer a text cannot run; that is said where it is to be run.
    runs = args.token_ids or texts.tokenizer is not None
    n_prompt = len(_encode(texts, args, prompt)[1]) if runs else 0
    n_answer = params.max_tokens or OPEN_ANSWER_TOKENS
    more: dict[str, Any] = {}
    if wants_plan(args) and measured(args) and 0 < n_prompt <= texts.max_positions - n_answer:
        workload = Workload(prompt_len=n_prompt, gen_len=n_answer, num_requests=params.n)
        more = {"workload": workload, "tokenizer": texts.tokenizer, "briefly": True}
    if auto:
        choose_formats(args, more.get("workload"), config=texts.config, native=texts.native_format)
    return more


def _encode(llm: LLM | Texts, args: argparse.Namespace, prompt: str) -> tuple[str | None, list[int]]:
    """The prompt as text (None if it was given as ids) and as token ids."""
    if args.token_ids:
        if args.chat or args.system is not None:
            raise UsageError("--token-ids is a prompt as it is; leave --chat and --system out")
        try:
            return None, [int(piece) for piece in prompt.split(",")]
        except ValueError:
            raise UsageError(f"--token-ids needs ids such as 1,15043,29892; got {prompt[:60]!r}") from None
    if args.chat or args.system is not None:
        from flexrun.chat import encode_chat

        messages = [{"role": "user", "content": prompt}]
        if args.system is not None:
            messages.insert(0, {"role": "system", "content": args.system})
        return encode_chat(llm.tokenizer, llm.chat_template, messages)
    if llm.tokenizer is None:
        raise UsageError("this model has no tokenizer: give the prompt as --token-ids")
    return prompt, llm.tokenizer.encode(prompt)


def _stream(llm: LLM, *, write: bool) -> RequestOutput:
    """Run passes until the request has ended, writing what each adds to the first answer."""
    engine = llm.engine
    n_written = 0
    while True:
        finished = engine.step()
        text = finished[0].outputs[0].text if finished else engine.partial_text(_REQUEST_ID)
        if write:
            if llm.tokenizer is None and finished:
                text = ",".join(map(str, finished[0].outputs[0].token_ids))
            sys.stdout.write(text[n_written:])
            n_written = len(text)
            if finished:
                sys.stdout.write("\n")
            sys.stdout.flush()
        if finished:
            return finished[0]


def _as_dict(output: RequestOutput, seconds: float) -> dict[str, Any]:
    n_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    return {
        "prompt_tokens": len(output.prompt_token_ids),
        "generated_tokens": n_tokens,
        "wall_seconds": seconds,
        "generated_tokens_per_s": n_tokens / max(seconds, 1e-9),
        "peak_rss_bytes": peak_rss_bytes(),
        "outputs": [
            {
                "index": answer.index,
                "text": answer.text,
                "token_ids": answer.token_ids,
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for answer in output.outputs
        ],
    }
