import json
import math
import subprocess
import sys

import pytest

from flexrun.request import MAX_LOGPROBS, CompletionOutput, Logprob, RequestOutput, SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.ignore_eos) == (16, 0, False)
    assert params.seed is None and params.logprobs is None and params.prompt_logprobs is None
    assert params.stop == () and params.stop_token_ids == () and params.logit_bias is None
    assert not params.greedy and SamplingParams(temperature=0).greedy


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("n", 0, "at least 1"),
        ("n", True, "integer"),
        ("n", 1.0, "integer"),
        ("temperature", -0.1, "finite number"),
        ("temperature", math.nan, "finite number"),
        ("temperature", math.inf, "finite number"),
        ("temperature", 10**400, "finite number"),
        ("temperature", "0.5", "must be a number"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_k", -2, "at least -1"),
        ("top_k", 1.5, "integer"),
        ("min_p", -0.1, r"\[0, 1\]"),
        ("typical_p", 0, r"\(0, 1\]"),
        ("presence_penalty", 2.1, r"\[-2, 2\]"),
        ("frequency_penalty", -2.1, r"\[-2, 2\]"),
        ("repetition_penalty", 0, "finite number"),
        ("seed", 1.5, "integer"),
        ("seed", 2**64, "at most"),
        ("stop", "", "empty"),
        ("stop", ["a", ""], "empty"),
        ("stop", [1], "stop_token_ids"),
        ("stop", 5, "list of strings"),
        ("stop_token_ids", [-1], "at least 0"),
        ("stop_token_ids", ["a"], "integer"),
        ("stop_token_ids", 3, "list of token ids"),
        ("ignore_eos", 1, "true or false"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 17, "at most max_tokens"),
        ("logprobs", -1, "at least 0"),
        ("logprobs", MAX_LOGPROBS + 1, "at most"),
        ("logprobs", True, "integer"),
        ("prompt_logprobs", 1.5, "integer"),
        ("logit_bias", [1], "must map"),
        ("logit_bias", {"x": 1}, "token ids"),
        ("logit_bias", {-1: 1}, "at least 0"),
        ("logit_bias", {3: 101}, r"logit_bias\[3\]"),
        ("logit_bias", {3: math.nan}, r"logit_bias\[3\]"),
    ],
)
def test_bad_values_name_option_and_limit(option, value, words):
    with pytest.raises(ValueError, match=words) as caught:
        SamplingParams(**{option: value})
    assert option in str(caught.value)


def test_values_are_normalised():
    params = SamplingParams(
        stop="x", stop_token_ids=[3, 3, 1], top_k=-1, seed=-1, logit_bias={"7": 1, 8: -2}, temperature=1
    )
    assert params.stop == ("x",) == params.stop_strings
    assert params.stop_token_ids == (3, 1)
    assert params.top_k == 0 and params.seed is None
    assert params.logit_bias == {7: 1.0, 8: -2.0}
    assert isinstance(params.temperature, float)
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b")
    assert SamplingParams(max_tokens=None, min_tokens=50).max_tokens is None
    hash(params)


def test_from_dict_refuses_unknown_options_with_the_nearest():
    with pytest.raises(ValueError, match=r"'temprature'.*temperature"):
        SamplingParams.from_dict({"temprature": 0})
    with pytest.raises(ValueError, match=r"'max_token'.*max_tokens"):
        SamplingParams.from_dict({"max_token": 3})
    with pytest.raises(ValueError, match="valid ones are n, temperature"):
        SamplingParams.from_dict({"zzzzqq": 3})
    assert SamplingParams.from_dict({"temperature": None, "top_k": 3}) == SamplingParams(top_k=3)


def test_round_trip_through_json():
    params = SamplingParams(
        stop=["a"], logit_bias={4: 1.5}, seed=7, logprobs=2, stop_token_ids=[9], min_p=0.1
    )
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params


def test_outputs_hold_what_vllm_users_read():
    answer = CompletionOutput(
        index=0, text="hi", token_ids=[1], logprobs=[{1: Logprob(logprob=-0.5, rank=1)}]
    )
    assert not answer.finished
    result = RequestOutput(request_id="a", prompt="p", prompt_token_ids=[5], outputs=[answer])
    assert result.finished and result.outputs[0].logprobs[0][1].decoded_token is None


def test_module_needs_neither_torch_nor_tokenizers():
    code = (
        "import sys, flexrun.request; "
        "assert not {'torch', 'tokenizers', 'jinja2', 'numpy'} & set(sys.modules), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
