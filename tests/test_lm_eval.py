import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from eval_helpers import TEXTS, make_tiny_model

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from flexrun.chat import ChatError  # noqa: E402
from flexrun.evaluate.lm_eval import FlexrunLM, usable_device  # noqa: E402
from flexrun.llm import LLM  # noqa: E402
from flexrun.request import RequestError  # noqa: E402

TASKS = {
    "tiny_choice": """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{q}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "tiny_generate": """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "zz"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
""",
    "tiny_text": """
task: tiny_text
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/text.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with model, data and task files."""
    folder = tmp_path_factory.mktemp("lm-eval")
    make_tiny_model(folder / "model")
    questions = [
        {"q": f"{TEXTS[i % 4][: 12 + 3 * i]}", "choices": ["yes", "no more", "one two three"], "gold": i % 3}
        for i in range(12)
    ]
    questions.append({"q": " ".join(TEXTS), "choices": ["yes", "no", "A B"], "gold": 1})  # beyond the window
    (folder / "choice.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    texts = [*TEXTS, " ".join(TEXTS * 2), "one"]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (folder / "tasks").mkdir()
    for name, text in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def llm(world):
    with LLM(world / "model", device="cpu", dtype="float32", cpu_mem="512MiB") as llm:
        yield llm


def evaluate(world, model):
    os.environ["HF_DATASETS_CACHE"] = str(world / "cache")
    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(world / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
        verbosity="ERROR",
    )


def test_results_equal_those_of_lm_evals_own_model(world, llm):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    model = FlexrunLM(llm)
    found = evaluate(world, model)
    reference = evaluate(
        world,
        huggingface.HFLM(
            str(world / "model"), device="cpu", dtype="float32", batch_size=1, trust_remote_code=False
        ),
    )
    for task in TASKS:
        ours, theirs = found["samples"][task], reference["samples"][task]
        assert len(ours) == len(theirs) > 0
        for a, b in zip(ours, theirs, strict=True):
            assert a["doc_id"] == b["doc_id"]
            if task == "tiny_generate":
                assert a["filtered_resps"] == b["filtered_resps"]
                continue
            for x, y in zip(_flat(a["filtered_resps"]), _flat(b["filtered_resps"]), strict=True):
                assert x == pytest.approx(y, abs=1e-3)
        for metric, value in reference["results"][task].items():
            if isinstance(value, float):
                assert found["results"][task][metric] == pytest.approx(value, rel=1e-3)
    assert found["config"]["model_fingerprint"] == llm.opened.fingerprint


def _flat(values):
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield float(value)


def instances(kind, arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def test_a_second_run_is_served_from_the_journal(llm, tmp_path):
    journal = tmp_path / "journal.jsonl"
    pairs = instances(
        "loglikelihood", [("one", f" {word}") for word in ("two", "three", "two")] + [("", "A")]
    )
    texts = instances("loglikelihood_rolling", [(" ".join(TEXTS),)])
    generations = instances("generate_until", [("one", {"until": [" "], "max_gen_toks": 4})])

    def run():
        model = FlexrunLM(llm, journal=journal)
        answers = (
            model.loglikelihood(pairs, disable_tqdm=True),
            model.loglikelihood_rolling(texts, disable_tqdm=True),
            model.generate_until(generations, disable_tqdm=True),
        )
        model.close()
        return answers, model.n_computed

    first, n_first = run()
    n_windows = len(llm.scorer.text(" ".join(TEXTS)))
    assert n_first == 3 + n_windows + 1  # "two" was asked twice
    second, n_second = run()
    assert second == first and n_second == 0
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-10])  # torn by a kill
    third, n_third = run()
    assert (
        third == first
        and n_third == 1
        and sorted(journal.read_bytes().splitlines()) == sorted(whole.splitlines())
    )


def test_other_settings_find_nothing_in_the_journal(llm, world, tmp_path):
    journal = tmp_path / "journal.jsonl"
    pairs = instances("loglikelihood", [("one", " two")])
    model = FlexrunLM(llm, journal=journal)
    model.loglikelihood(pairs, disable_tqdm=True)
    model.close()
    with LLM(world / "model", device="cpu", dtype="bfloat16", cpu_mem="512MiB") as other:
        model = FlexrunLM(other, journal=journal)
        model.loglikelihood(pairs, disable_tqdm=True)
        assert model.n_computed == 1
        model.close()
    with pytest.raises(ValueError, match="line 1, is not an entry"):
        (tmp_path / "strange.jsonl").write_text('{"a": 1}\n')
        FlexrunLM(llm, journal=tmp_path / "strange.jsonl")


def test_each_result_reaches_the_cache_hook(llm):
    class Hook:
        calls = []  # noqa: RUF012

        def add_partial(self, *args):
            self.calls.append(args)

    model = FlexrunLM(llm)
    model.set_cache_hook(Hook())
    found = model.loglikelihood(instances("loglikelihood", [("one", " two"), ("", "A")]), disable_tqdm=True)
    assert sorted(Hook.calls) == sorted(
        ("loglikelihood", args, value)
        for args, value in zip([("one", " two"), ("", "A")], found, strict=True)
    )
    assert all(isinstance(logprob, float) and isinstance(greedy, bool) for logprob, greedy in found)


def test_the_constructor_bears_what_lm_eval_passes(world, llm, caplog):
    model = FlexrunLM.create_from_arg_obj(
        {
            "pretrained": str(world / "model"),
            "dtype": "float32",
            "cpu_mem": "512MiB",
            "trust_remote_code": True,
        },
        {"batch_size": "auto:4", "max_batch_size": None, "device": "cuda:0"},
    )
    assert "trust_remote_code has no effect" in caplog.text
    assert model.llm.device.torch_device.type in ("cpu", "cuda") and usable_device(None) == "auto"
    pairs = instances("loglikelihood", [("one", " two")])
    assert model.loglikelihood(pairs)[0][0] == pytest.approx(
        FlexrunLM(llm).loglikelihood(pairs)[0][0], abs=1e-4
    )
    assert model.tokenizer_name.endswith("model") and "/" not in model.tokenizer_name
    model.close()
    with pytest.raises(ValueError, match="did you mean dtype"):
        FlexrunLM(str(world / "model"), dtypes="float32")


def test_chat_templates(llm):
    model = FlexrunLM(llm)
    messages = [{"role": "user", "content": "hi"}]
    assert model.apply_chat_template(messages) == "<|im|>user: hi\n<|im|>assistant: "
    open_ended = [*messages, {"role": "assistant", "content": " I say "}]
    assert model.apply_chat_template(open_ended, add_generation_prompt=False) == (
        "<|im|>user: hi\n<|im|>assistant:  I say "
    )
    assert model.chat_template(True) == llm.chat_template.source and model.chat_template(False) is None
    with pytest.raises(ValueError, match="only one"):
        model.chat_template("other")
    with pytest.raises(ChatError):
        model.apply_chat_template([{"role": "nobody", "content": "hi"}])


def test_generation_settings(llm):
    model = FlexrunLM(llm)
    prompt = model._generation("one two", {"until": "x", "max_gen_toks": 5}, 0)
    assert prompt.params.greedy and prompt.params.max_tokens == 5
    assert prompt.params.stop_strings == ("x", "</s>")
    long = model._generation(" ".join(TEXTS), {"until": [], "max_gen_toks": 60}, 0)
    assert len(long.token_ids) == llm.max_model_len - 60
    assert long.token_ids == llm.tokenizer.encode(" ".join(TEXTS))[-4:]
    kwargs = {"do_sample": True, "temperature": 0.8, "max_gen_toks": 4}
    seeds = [model._generation("one", kwargs, i).params.seed for i in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1]
    with pytest.raises(RequestError, match="leaves no room"):
        model._generation("one", {"max_gen_toks": 64}, 0)
    with pytest.raises(RequestError, match="limit is 64"):
        model._loglikelihood_tokens([(("a", "b"), [5], [6] * 65)], disable_tqdm=True)


def command(world, tmp_path, *flags):
    words = [sys.executable, "-m", "flexrun", "lm-eval", "-m", str(world / "model"), "--device", "cpu"]
    words += ["--dtype", "float32", "--cpu-mem", "512MiB", "--tasks", "tiny_choice", "tiny_text"]
    words += ["--include_path", str(world / "tasks"), "--output_path", str(tmp_path / "results"), *flags]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "HF_DATASETS_CACHE": str(world / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    return {"args": words, "cwd": Path(__file__).parents[1], "env": environment}


@pytest.mark.slow
def test_the_command_goes_on_after_a_kill(world, tmp_path):
    call = command(world, tmp_path, "--gpu-batch-size", "1", "--log_samples")
    process = subprocess.Popen(**call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (journals := list((tmp_path / "xdg").glob("flexrun/journals/*.jsonl"))) or (
        journals[0].read_bytes().count(b"\n") < 5
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = journals[0].read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    done = subprocess.run(**call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole = journals[0].read_bytes()
    assert whole.startswith(kept) and len(set(whole.splitlines())) == whole.count(b"\n") >= 13 * 3 + 6
    assert "tiny_choice" in done.stdout and "acc_norm" in done.stdout
    assert "Tasks" in done.stdout  # the table's headings, which an old pytablewriter leaves out
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["tiny_text"]["word_perplexity,none"] > 1
    refused = subprocess.run(
        **command(world, tmp_path, "--model_args", "a=b"), capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2 and "flexrun's own flags" in refused.stderr
