"""A small deterministic engine and tokenizer for the tests of jobs, importable in subprocesses."""

import hashlib
import json
import math
import time
from types import SimpleNamespace

from flexrun.chat import ChatTemplate
from flexrun.request import CompletionOutput, Logprob, RequestOutput


class FakeTokenizer:
    """One token per UTF-8 byte; token 256 is BOS, 257 ends an answer."""

    def encode(self, text, add_special_tokens=True):
        ids = list(text.encode())
        return [256, *ids] if add_special_tokens else ids

    def decode(self, token_ids, skip_special_tokens=True):
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def token_text(self, token_id):
        return {256: "<s>", 257: "</s>"}.get(token_id) or bytes([token_id]).decode(errors="replace")


def encode_chat(messages, **variables):
    """The fake model's chat template."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
    text += "<assistant>" + "".join(f"[{key}={value}]" for key, value in sorted(variables.items()))
    return text, FakeTokenizer().encode(text, add_special_tokens=False)


class FakeEngine:
    """Every pass gives one token to each of at most `block_size` sequences; tokens hash prompt and seed."""

    def __init__(self, block_size=8, max_model_len=512, step_seconds=0.0, fail_at_step=None):
        self.block_size, self.max_model_len = block_size, max_model_len
        self.step_seconds, self.fail_at_step = step_seconds, fail_at_step
        self.waiting, self.running = {}, {}
        self.n_steps = self.n_added = self.most_waiting = 0
        self.stats = SimpleNamespace(generated_tokens=0, prompt_tokens=0)

    @property
    def num_waiting(self):
        return len(self.waiting)

    def has_unfinished(self):
        return bool(self.waiting or self.running)

    def add_request(self, request_id, prompt_token_ids, params, prompt_text=None, *, score_from=None):
        assert request_id not in self.waiting and request_id not in self.running
        length = len(prompt_token_ids) + (params.max_tokens or 1)
        if score_from is not None:
            length -= (params.max_tokens or 1) + 1
        if length > self.max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt_token_ids)} tokens; with max_tokens {params.max_tokens} that is"
                f" {length}, the model's limit is {self.max_model_len}"
            )
        self.waiting[request_id] = (prompt_token_ids, params, prompt_text, score_from)
        self.n_added += 1
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def abort(self, request_id):
        self.waiting.pop(request_id, None)
        self.running.pop(request_id, None)

    def step(self):
        self.n_steps += 1
        if self.n_steps == self.fail_at_step:
            raise RuntimeError("the device fell over")
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while self.waiting and len(self.running) < self.block_size:
            request_id = next(iter(self.waiting))
            self.running[request_id] = [self.waiting.pop(request_id), 0]
        finished = []
        for request_id, state in list(self.running.items()):
            (prompt, params, text, score_from), n_done = state
            if score_from is not None:
                del self.running[request_id]
                self.stats.prompt_tokens += len(prompt)
                finished.append(self._scored(request_id, prompt, params, text, score_from))
                continue
            state[1] = n_done + 1
            self.stats.generated_tokens += params.n
            if state[1] >= (params.max_tokens or 4):
                del self.running[request_id]
                finished.append(self._output(request_id, prompt, params, text))
        return finished

    def partial_text(self, request_id):
        if request_id not in self.running:
            return ""
        (prompt, params, text, _), n_done = self.running[request_id]
        return self._output(request_id, prompt, params, text).outputs[0].text[:n_done]

    def _output(self, request_id, prompt, params, text):
        outputs = []
        for index in range(params.n):
            seed = (
                f"{prompt}/{params.seed if params.temperature else None}/{index if params.temperature else 0}"
            )
            digest = hashlib.sha256(seed.encode()).digest()
            ids = [97 + digest[i % 32] % 26 for i in range(params.max_tokens or 4)]
            logprobs = None
            if params.logprobs is not None:
                logprobs = [self._position(token, params.logprobs) for token in ids]
            outputs.append(
                CompletionOutput(
                    index=index,
                    text="".join(map(chr, ids)),
                    token_ids=ids,
                    logprobs=logprobs,
                    finish_reason="length",
                )
            )
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self._position(token, params.prompt_logprobs) for token in prompt[1:])]
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
        )

    def _scored(self, request_id, prompt, params, text, score_from):
        first = max(1, score_from)
        positions = [self._position(token, params.prompt_logprobs or 0) for token in prompt[first:]]
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt,
            prompt_logprobs=[None] * min(first, len(prompt)) + positions,
            outputs=[
                CompletionOutput(
                    index=0,
                    text="",
                    token_ids=[],
                    logprobs=None if params.logprobs is None else [],
                    finish_reason="length",
                )
            ],
        )

    def _position(self, token, alternatives):
        position = {token: Logprob(logprob=-0.5, rank=1, decoded_token=FakeTokenizer().token_text(token))}
        for i in range(1, alternatives):
            other = (token + i) % 256
            position[other] = Logprob(logprob=-1.0 * i if i < 2 else -math.inf, rank=i + 1)
        return position


class FakeLLM:
    """What the commands use of flexrun.llm.LLM."""

    def __init__(self, engine=None, tokenizer=True, notes=()):
        self.engine = engine or FakeEngine()
        self.tokenizer = FakeTokenizer() if tokenizer else None
        self.chat_template = ChatTemplate(
            "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
        )
        self.policy = SimpleNamespace(block_size=self.engine.block_size)
        self.notes = list(notes)
        self.n_closed = 0

    def close(self):
        self.n_closed += 1


def read_results(path):
    """Output records by custom_id; fails on a broken line or an id that is there twice."""
    results = {}
    data = path.read_bytes()
    assert not data or data.endswith(b"\n")
    for line in data.split(b"\n")[:-1]:
        record = json.loads(line)
        assert record["custom_id"] not in results, f"{record['custom_id']} is there twice"
        results[record["custom_id"]] = record
    return results
