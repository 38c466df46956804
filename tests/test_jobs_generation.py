import json

import pytest
from jobs_fake import FakeEngine, FakeTokenizer, encode_chat

from flexrun.jobs.generation import GenerationJob, derived_seed
from flexrun.jobs.lines import LineError, LineIdentity

IDENTITY = LineIdentity(custom_id="a", number=3, content=5, derived=False)


def job(**kwargs):
    kwargs = {"tokenizer": FakeTokenizer(), "encode_chat": encode_chat, **kwargs}
    return GenerationJob(model_name="tiny", **kwargs)


def batch(body, url="/v1/completions", **other):
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **other}


def chat(**body):
    return batch({"messages": [{"role": "user", "content": "hi"}], **body}, "/v1/chat/completions")


def result(kind, fields, engine=None):
    engine = engine or FakeEngine()
    request = kind.parse(fields, IDENTITY)
    prompts = kind.prompts(request)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt.token_ids, prompt.params, prompt.text)
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    body = kind.body(request, [outputs[str(index)] for index in range(len(prompts))])
    json.dumps(body, allow_nan=False)
    return body


@pytest.mark.parametrize(
    "prompt, n_prompts",
    [
        ("hi", 1),
        (["a", "b", "c"], 3),
        ([5, 6, 7], 1),
        ([[5, 6], [7]], 2),
        ({"prompt_token_ids": [1, 2]}, 1),
        ("", 1),
    ],
)
def test_prompt_forms(prompt, n_prompts):
    for fields in (batch({"prompt": prompt, "n": 2}), {"prompt": prompt, "n": 2}):
        body = result(job(), fields)
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * n_prompts))
        assert body["object"] == "text_completion" and body["model"] == "tiny"
        assert body["usage"]["completion_tokens"] == 16 * 2 * n_prompts
        assert body["usage"]["total_tokens"] == sum(list(body["usage"].values())[:2])


def test_choices_are_ordered_by_prompt_then_answer():
    body = result(job(), batch({"prompt": ["x", "y"], "n": 2, "seed": 1}))
    alone = [result(job(), batch({"prompt": p, "n": 2, "seed": 1}))["choices"] for p in "xy"]
    assert [c["text"] for c in body["choices"]] == [c["text"] for choices in alone for c in choices]


def test_text_gets_bos_and_chat_does_not():
    kind = job()
    assert kind.prompts(kind.parse({"prompt": "a"}, IDENTITY))[0].token_ids == [256, 97]
    prompt = kind.prompts(kind.parse(chat(chat_template_kwargs={"think": False}), IDENTITY))[0]
    assert prompt.text == "<user>hi<assistant>[think=False]"
    assert prompt.token_ids == list(prompt.text.encode())


@pytest.mark.parametrize(
    "fields, code, words",
    [
        ({}, "missing_field", "'prompt' or 'messages'"),
        ({"prompt": None}, "missing_field", "'prompt' or 'messages'"),
        ({"prompt": "a", "messages": []}, "invalid_request", "prompt and messages"),
        ({"prompt": "a", "max_token": 3}, "unknown_option", "'max_token'.*max_tokens"),
        ({"prompt": "a", "echoo": True}, "unknown_option", "echo"),
        ({"prompt": "a", "temperature": "hot"}, "invalid_option", "temperature must be a number, got 'hot'"),
        ({"prompt": "a", "top_p": 0}, "invalid_option", "top_p"),
        ({"prompt": "a", "max_tokens": 0}, "invalid_option", "max_tokens must be at least 1"),
        ({"prompt": "a", "echo": 1}, "invalid_option", "echo must be true or false"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "invalid_option", "for messages"),
        ({"prompt": []}, "invalid_prompt", "empty"),
        ({"prompt": [[1], []]}, "invalid_prompt", "prompt 2 is empty"),
        ({"prompt": ["a", 1]}, "invalid_prompt", "list of strings"),
        ({"prompt": [1, True]}, "invalid_prompt", "token ids"),
        ({"prompt": [1, -1]}, "invalid_prompt", "integers from 0"),
        ({"prompt": [1.5]}, "invalid_prompt", "integers"),
        ({"prompt": 7}, "invalid_prompt", "found 7"),
        ({"prompt": {"text": "a"}}, "invalid_prompt", "found"),
        ({"prompt_token_ids": ["a"]}, "invalid_prompt", "prompt_token_ids"),
        ({"messages": [{"role": "user", "content": "a"}], "echo": True}, "invalid_option", "echo"),
        (batch({"prompt": "a"}, url="/v1/embeddings"), "unsupported_url", "'/v1/embeddings'"),
        (batch({"prompt": "a"}, url=3), "unsupported_url", "found 3"),
        (batch({"prompt": "a"}, method="GET"), "unsupported_method", "'GET'"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}, "missing_field", "'method'"),
        ({"method": "POST", "url": "/v1/completions", "body": {}}, "missing_field", "'custom_id'"),
        ({"custom_id": "a", "method": "POST", "url": "/v1/completions"}, "missing_field", "'body'"),
        (batch({"prompt": "a"}, custom_id=7), "invalid_id", "must be a string"),
        (batch([1]), "invalid_request", "body must be an object, found an array"),
        (batch({"prompt": "a"}, temperature=0), "unknown_option", "'temperature'"),
        (batch({}), "missing_field", "body.prompt"),
        (batch({"prompt": "a"}, url="/v1/chat/completions"), "unknown_option", "'prompt'"),
        (batch({"model": "m"}, url="/v1/chat/completions"), "missing_field", "body.messages"),
        (batch({"prompt": "a", "model": 3}), "invalid_option", "body.model"),
        (batch({"prompt": "a", "stream": True}), "unsupported_option", "stream"),
        (batch({"prompt": "a", "suffix": "b"}), "unsupported_option", "suffix"),
        (batch({"prompt": "a", "best_of": 3}), "unsupported_option", "best_of"),
        (batch({"prompt": "a", "stopp": "b"}), "unknown_option", "did you mean stop"),
        (chat(logprobs=3), "invalid_option", "logprobs must be true or false"),
        (chat(top_logprobs=3), "invalid_option", "needs logprobs"),
        (chat(max_tokens=3, max_completion_tokens=4), "invalid_option", "differ"),
        (chat(tools=[{"type": "function"}]), "unsupported_option", "tools"),
        (chat(response_format={"type": "json_object"}), "unsupported_option", "response_format"),
        (chat(chat_template_kwargs=[]), "invalid_option", "chat_template_kwargs"),
        (chat(chat_template_kwargs={"messages": []}), "invalid_option", "'messages'"),
    ],
)  # fmt: skip
def test_bad_fields_name_the_field_and_what_was_found(fields, code, words):
    with pytest.raises(LineError, match=words) as caught:
        job().parse(fields, IDENTITY)
    assert caught.value.code == code


def test_harmless_fields_of_the_web_api_are_taken():
    body = {"prompt": "a", "stream": False, "user": "u", "n": 2, "best_of": 2, "suffix": None, "stop": None}
    fields = batch({**body, "metadata": {"a": 1}, "model": "whatever"})
    assert job().parse(fields, IDENTITY).params.n == 2
    job().parse(chat(tools=[], tool_choice="auto", response_format={"type": "text"}), IDENTITY)


def test_options_of_line_beat_job_beat_defaults():
    kind = job(defaults={"temperature": 0.0, "max_tokens": 5, "top_k": None})
    params = kind.parse({"prompt": "a", "temperature": 0.7}, IDENTITY).params
    assert (params.temperature, params.max_tokens, params.top_k) == (0.7, 5, 0)
    assert kind.parse({"prompt": "a", "temperature": None}, IDENTITY).params.temperature == 0.0
    assert kind.parse(chat(), IDENTITY).params.max_tokens == 5
    assert job().parse(chat(), IDENTITY).params.max_tokens is None
    assert job().parse(chat(max_completion_tokens=9), IDENTITY).params.max_tokens == 9
    assert job().parse({"prompt": "a"}, IDENTITY).params.max_tokens == 16
    with pytest.raises(ValueError, match="top_p"):
        job(defaults={"top_p": 3})


def test_seeds_come_from_job_and_id_only():
    def seed(fields, custom_id="a", **kwargs):
        identity = LineIdentity(custom_id=custom_id, number=1, content=1, derived=False)
        return job(**kwargs).parse(fields, identity).params.seed

    hot = {"prompt": "a", "temperature": 1.0}
    assert seed(hot) == seed(hot) == derived_seed(0, "a")
    assert len({seed(hot), seed(hot, "b"), seed(hot, seed=1)}) == 3
    assert seed({**hot, "seed": 7}) == 7
    assert seed({**hot, "seed": -1}) == derived_seed(0, "a")
    assert seed({"prompt": "a", "temperature": 0}) is None
    assert seed({"prompt": "a"}, defaults={"seed": 3}) == 3
    kind = job()
    prompts = kind.prompts(kind.parse({"prompt": ["a", "a"]}, IDENTITY))
    assert prompts[0].params.seed != prompts[1].params.seed
    prompts = kind.prompts(kind.parse({"prompt": ["a", "a"], "seed": 5}, IDENTITY))
    assert prompts[0].params.seed == prompts[1].params.seed == 5


def test_completion_logprobs_and_echo():
    body = result(job(), batch({"prompt": "hé", "max_tokens": 2, "logprobs": 3, "temperature": 0}))
    logprobs = body["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == body["choices"][0]["text"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5] and logprobs["text_offset"] == [0, 1]
    assert min(logprobs["top_logprobs"][0].values()) == -9999.0  # JSON has no minus infinity

    echoed = result(job(), batch({"prompt": "ab", "max_tokens": 2, "logprobs": 1, "echo": True}))["choices"][
        0
    ]
    assert echoed["text"].startswith("ab") and len(echoed["text"]) == 4
    assert echoed["logprobs"]["tokens"][:3] == ["<s>", "a", "b"]
    assert echoed["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert "prompt_logprobs" not in echoed

    ids = result(job(), batch({"prompt": [97, 98], "max_tokens": 1, "echo": True}))["choices"][0]
    assert ids["text"].startswith("ab") and ids["logprobs"] is None


def test_max_tokens_zero_with_echo_scores_the_prompt():
    body = result(job(), batch({"prompt": "ab", "max_tokens": 0, "logprobs": 1, "echo": True}))
    choice = body["choices"][0]
    assert choice["text"] == "ab" and choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    assert choice["finish_reason"] == "length"


def test_chat_body_and_logprobs():
    body = result(job(), chat(max_tokens=2, logprobs=True, top_logprobs=2, n=2, temperature=1.0))
    assert body["object"] == "chat.completion" and len(body["choices"]) == 2
    choice = body["choices"][1]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    first = choice["logprobs"]["content"][0]
    assert first["token"] == choice["message"]["content"][0] and first["bytes"] == list(
        first["token"].encode()
    )
    assert [entry["logprob"] for entry in first["top_logprobs"]] == [-0.5, -1.0]
    assert result(job(), chat(logprobs=False))["choices"][0]["logprobs"] is None
    assert result(job(), chat(logprobs=True))["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_prompt_logprobs_are_given_where_asked_for():
    choice = result(job(), batch({"prompt": "ab", "prompt_logprobs": 1}))["choices"][0]
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1]["97"]["rank"] == 1
    assert result(job(), chat(prompt_logprobs=0))["prompt_logprobs"][0] is None


def test_a_model_without_tokenizer_takes_and_gives_ids():
    kind = job(tokenizer=None, encode_chat=None)
    choice = result(kind, {"prompt": [1, 2], "max_tokens": 3, "logprobs": 0})["choices"][0]
    assert len(choice["token_ids"]) == 3 and choice["prompt_token_ids"] == [1, 2]
    with pytest.raises(ValueError, match="no tokenizer"):
        kind.prompts(kind.parse({"prompt": "a"}, IDENTITY))
    with pytest.raises(ValueError, match="cannot chat"):
        kind.prompts(kind.parse(chat(), IDENTITY))
    assert "token_ids" not in result(job(), {"prompt": [1, 2]})["choices"][0]
    assert "token_ids" in result(job(), {"prompt": [1, 2], "return_token_ids": True})["choices"][0]
    assert "token_ids" in result(job(), chat(return_token_ids=True))["choices"][0]
