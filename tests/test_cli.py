import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from jobs_fake import FakeEngine, FakeLLM, read_results

import flexrun.cli
from flexrun.cli import COMMANDS, build_parser, main
from flexrun.cli.exits import explain, is_refusal
from flexrun.cli.flags import (
    add_model_flags,
    add_policy_flags,
    add_sampling_flags,
    policy_options,
    sampling_options,
    wants_plan,
)
from flexrun.cli.interrupts import StopRequest
from flexrun.jobs.output import OutputError, OutputRefusedError
from flexrun.request import SamplingParams
from policy.tiers import Placement, Policy

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_profile(tmp_path, monkeypatch):
    """Nothing is planned here, whatever has been measured on the machine that runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llm(monkeypatch):
    """The commands get this fake model instead of a loaded one."""
    fake = FakeLLM()
    for name in ("batch", "generate"):
        monkeypatch.setattr(importlib.import_module(f"flexrun.cli.{name}"), "load_llm", lambda args: fake)
    return fake


@pytest.fixture
def job(tmp_path, llm):
    """An input file of five requests, and a function that runs them: (exit status, results)."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": f"r{i}", "prompt": f"p{i}"}) + "\n" for i in range(5)))

    def run(*flags, output=target):
        status = main(
            ["batch", "-m", "opt-125m", "--dummy-weights", "-i", str(source), "-o", str(output), *flags]
        )
        return status, read_results(target) if target.exists() else {}

    run.source, run.target = source, target
    return run


def parse(*words):
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_policy_flags(parser)
    return parser.parse_args(["-m", "x", *words])


# -- start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["batch", "--help"], ["info", "--help"], []])
def test_help_needs_nothing_heavy(words):
    code = (
        "import sys; from flexrun.__main__ import main\n"
        f"try: main({words!r})\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'numpy', 'scipy', 'numba', 'rich', 'jinja2', 'tokenizers', 'transformers', 'pulp'}\n"
        "sys.stderr.write('HEAVY ' + ' '.join(sorted(heavy & set(sys.modules)))); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if words else 2)
    assert done.stderr.endswith("HEAVY ")
    if words == ["--help"]:
        for name, text in COMMANDS.items():
            assert re.search(rf"{name} +{re.escape(text)}", done.stdout)
        assert "exit status: 0 all" in done.stdout


def test_commands_have_the_agreed_form():
    parser = build_parser()
    (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    assert list(subparsers.choices) == list(COMMANDS)
    assert {a.dest: a.help for a in subparsers._choices_actions} == COMMANDS
    for name in COMMANDS:
        assert callable(importlib.import_module(f"flexrun.cli.{name.replace('-', '_')}").run)
        subparsers.choices[name].format_help()


def test_python_m_and_console_script_are_the_same():
    done = subprocess.run(
        [sys.executable, "-m", "flexrun", "--version"], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.split() == ["flexrun", flexrun.__version__]


def test_importing_flexrun_is_light_and_lazy():
    code = (
        "import sys, flexrun, quant, policy\n"
        "assert not {'torch', 'numpy', 'policy.tiers', 'flexrun.request'} & set(sys.modules)\n"
        "assert flexrun.SamplingParams(max_tokens=3).max_tokens == 3\n"
        "assert flexrun.Policy.__module__ == 'policy.tiers' and 'LLM' in dir(flexrun)\n"
        "from flexrun import Placement, RequestOutput\n"
        "assert 'torch' not in sys.modules\n"
        "try: flexrun.nonsense\n"
        "except AttributeError as error: assert 'nonsense' in str(error)\n"
        "else: sys.exit('no AttributeError')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["policy.py", "quant.py", "offload/__init__.py"])
def test_a_users_module_that_hides_ours_is_named(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("x = 1\n")
    options = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "cwd": tmp_path}
    done = subprocess.run(
        [sys.executable, "-c", "import flexrun"], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 1 and f"finds {file}" in done.stderr and "rename it" in done.stderr
    also = f"import {file.parent.name if '/' in name else file.stem}, flexrun"
    done = subprocess.run(
        [sys.executable, "-c", also], capture_output=True, text=True, check=False, **options
    )
    assert "needs its own package" in done.stderr


# -- flags ------------------------------------------------------------------------------------------------


def test_sampling_flags_are_the_fields_with_dashes():
    assert sampling_options(parse()) == {}
    names = set(sampling_options(parse())) | {
        action.dest for action in _actions() if action.dest in SamplingParams.option_names()
    }
    assert names == set(SamplingParams.option_names())  # the seed is among the model's flags
    words = "--max-tokens 5 --temperature 0 --stop a --stop b --stop-token-ids 2,3 --top-k -1 --ignore-eos"
    args = parse(*words.split(), "--no-skip-special-tokens", "--logit-bias", '{"7": -5}')
    params = SamplingParams.from_dict(sampling_options(args))
    assert (params.max_tokens, params.temperature, params.stop) == (5, 0.0, ("a", "b"))
    assert params.stop_token_ids == (2, 3) and params.logit_bias == {7: -5.0}
    assert params.ignore_eos and not params.skip_special_tokens


def _actions():
    parser = argparse.ArgumentParser()
    add_model_flags(parser)
    add_sampling_flags(parser)
    add_policy_flags(parser)
    return parser._actions


def test_policy_flags(tmp_path):
    assert policy_options(parse()) == {} == policy_options(parse("--policy", "auto"))
    assert policy_options(parse("--policy", "default", "--gpu-batch-size", "2")) == {
        "policy": "default",
        "gpu_batch_size": 2,
    }
    assert wants_plan(parse()) and wants_plan(parse("--gpu-batch-size", "4"))
    assert not wants_plan(parse("--policy", "default")) and not wants_plan(parse("--weights", "0,1,0"))
    options = policy_options(parse("--gpu-batch-size", "8", "--weights", "0,0.5,0.5", "--no-overlap"))
    half = Placement(cpu_frac=0.5, disk_frac=0.5)
    assert options == {"gpu_batch_size": 8, "weights": half, "overlap": False}
    given = Policy(weights=half, cache=half, activations=half, gpu_batch_size=4)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(given.to_dict()))
    policy = policy_options(parse("--policy", str(file), "--num-gpu-batches", "3"))["policy"]
    assert (policy.gpu_batch_size, policy.num_gpu_batches, policy.overlap) == (4, 3, True)
    with pytest.raises(ValueError, match=r"missing\.json"):
        policy_options(parse("--policy", str(tmp_path / "missing.json")))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--weights", "0.5,0.5"], "weights must be three fractions"),
        (["--cache", "0.5,0.4,0"], "sum to 1"),
        (["--gpu-mem", "lots"], "lots"),
        (["--cpu-mem", "120%"], "at most 100%"),
        (["--gpu-batch-size", "0"], "at least 1"),
        (["--seed", "x"], "whole number"),
        (["--weight-format", "int5-g7"], "int5-g7"),
        (["--cache-format", "int3"], "int3"),
        (["--dtype", "float64"], "float64"),
        (["--logit-bias", "7"], "JSON object"),
        (["--stop-token-ids", "a"], "token ids"),
        (["--max-token", "3"], "--max-token"),
    ],
)
def test_bad_flags_are_usage_errors(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["batch", "-m", "x", "-i", "a", "-o", "b", *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


# -- batch ------------------------------------------------------------------------------------------------


def test_batch_runs_resumes_and_reports(job, llm, capsys):
    status, results = job("--json", "--temperature", "0")
    captured = capsys.readouterr()
    assert status == 0 and len(results) == 5 and llm.n_closed == 1
    summary = json.loads(captured.out)
    assert summary["requests"] == summary["succeeded"] == 5
    assert summary["generated_tokens"] == 5 * 16 and summary["prompt_tokens"] == 15
    assert summary["generated_tokens_per_s"] > 0 and summary["peak_rss_bytes"] > 1e6
    assert "generated tokens/s" in captured.err
    before = job.target.read_bytes()
    status, _ = job("--json", "--temperature", "0")
    summary = json.loads(capsys.readouterr().out)
    assert status == 0 and (summary["resumed"], summary["succeeded"]) == (5, 0)
    assert job.target.read_bytes() == before


def test_batch_refuses_other_settings_before_loading(job, llm, monkeypatch, capsys):
    job("--temperature", "0")
    before = job.target.read_bytes()
    monkeypatch.setattr("flexrun.cli.batch.load_llm", lambda args: pytest.fail("loaded"))
    for flags, words in (
        (["--temperature", "0.5"], 'sampling was {"temperature": 0.0}, now {"temperature": 0.5}'),
        (["--temperature", "0", "--seed", "1"], "seed was 0, now 1"),
        (["--temperature", "0", "--dtype", "bfloat16"], 'now "bfloat16"'),
        (["--temperature", "0", "--weight-format", "int4-g64"], 'weight_format was "auto", now "int4-g64"'),
        (["--temperature", "0", "-m", "opt-350m"], "model_fingerprint was"),
    ):
        capsys.readouterr()
        if "bfloat16" in flags and _auto_dtype() == "bfloat16":
            continue
        assert job(*flags)[0] == 2
        error = capsys.readouterr().err
        assert words in error and "--overwrite" in error and "Traceback" not in error
    assert job.target.read_bytes() == before


def _auto_dtype():
    from flexrun.cli.session import resolved_dtype

    return resolved_dtype(argparse.Namespace(device="auto", dtype="auto"))


def test_batch_goes_on_with_other_budgets_and_placement(job):
    assert job("--limit", "2")[0] == 0
    status, results = job("--cpu-mem", "1GiB", "--gpu-batch-size", "2", "--weights", "0,1,0", "--no-overlap")
    assert status == 0 and len(results) == 5


def test_batch_overwrite_starts_again_with_new_settings(job):
    job("--temperature", "0")
    status, results = job("--temperature", "0", "--overwrite", "--max-tokens", "3", "--limit", "2")
    assert status == 0 and list(results) == ["r0", "r1"]
    assert results["r0"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert job("--temperature", "0", "--max-tokens", "3")[0] == 0


def test_a_failed_load_leaves_earlier_results_alone(job, monkeypatch, capsys):
    job()
    before = job.target.read_bytes()

    def fail(args):
        raise MemoryError("no room")

    monkeypatch.setattr("flexrun.cli.batch.load_llm", fail)
    assert job("--overwrite")[0] == 3
    assert job.target.read_bytes() == before and "out of memory: no room" in capsys.readouterr().err


def test_the_exit_status_tells_of_failed_requests_now_and_before(job, capsys):
    with job.source.open("a") as stream:
        stream.write('{"id": "bad", "prompt": "a", "top_p": 9}\nnonsense\n')
    status, results = job()
    assert status == 1 and results["bad"]["error"]["line"] == 6 and results["line-7"]["error"]["line"] == 7
    assert job()[0] == 1  # the records are still there
    job.source.write_text(job.source.read_text().replace("nonsense\n", "").replace(": 9", ": 0.9"))
    assert job("--retry-failed")[0] == 0
    assert "2 failed" in capsys.readouterr().err


def test_batch_from_stdin_to_stdout(llm, monkeypatch, capfdbinary):
    reader, writer = os.pipe()
    os.write(
        writer,
        b'{"id": "a", "prompt": "x"}\n{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}',
    )
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["batch", "-m", "opt-125m", "--dummy-weights", "-i", "-", "-o", "-"]) == 0
    out, err = capfdbinary.readouterr()
    records = {json.loads(line)["custom_id"]: json.loads(line) for line in out.splitlines()}
    assert set(records) == {"a", "line-2"}
    assert records["line-2"]["response"]["body"]["usage"]["prompt_tokens"] == len("<user>hi<assistant>")
    assert b"requests" in err


def test_batch_writes_to_devices_without_a_manifest(job):
    assert job(output="/dev/null")[0] == 0 and not Path("/dev/null.manifest.json").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["-i", "missing.jsonl", "-o", "out.jsonl"], "cannot open the input missing.jsonl"),
        (["-i", "in.jsonl", "-o", "in.jsonl"], "same file"),
        (["-i", "in.jsonl", "-o", "nowhere/out.jsonl"], "does not exist"),
        (["-i", "in.jsonl", "-o", "-", "--json"], "both write to standard output"),
        (["-i", "in.jsonl", "-o", "foreign.txt"], "not its manifest"),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--top-p", "7"], "top_p"),
        (["-i", "in.jsonl", "-o", "out.jsonl", "--overwrite", "--retry-failed"], "leave --retry-failed out"),
        (["-i", "in.jsonl", "-o", "out.jsonl", "-m", "no/such-model"], "hf download no/such-model"),
    ],
)
def test_batch_refuses_before_loading(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "a"}\n')
    Path("foreign.txt").write_text("precious\n")
    monkeypatch.setattr("flexrun.cli.batch.load_llm", lambda args: pytest.fail("loaded"))
    status = main(["batch", "-m", "opt-125m", "--dummy-weights", *words])
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert status == 2 and Path("foreign.txt").read_text() == "precious\n"


def test_a_preset_without_dummy_weights_is_refused(tmp_path, capsys):
    assert main(["batch", "-m", "opt-125m", "-i", "-", "-o", str(tmp_path / "o")]) == 2
    assert "--dummy-weights" in capsys.readouterr().err


def test_a_second_run_on_one_output_is_refused(job, capsys):
    from flexrun.jobs.output import JobOutput

    with JobOutput(job.target):
        assert job()[0] == 2
    assert "another run is writing" in capsys.readouterr().err


def test_an_interrupted_batch_keeps_its_results(job, llm, capsys):
    llm.engine = FakeEngine(block_size=1)
    step = llm.engine.step

    def interrupting():
        if llm.engine.n_steps == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    llm.engine.step = interrupting
    status, results = job()
    assert status == 130 and list(results) == ["r0"]
    assert "goes on from here" in capsys.readouterr().err
    llm.engine = FakeEngine()
    assert job()[0] == 0


def test_an_engine_failure_is_one_message_and_keeps_results(job, llm, capsys, monkeypatch):
    llm.engine = FakeEngine(block_size=2, fail_at_step=20)
    status, results = job()
    error = capsys.readouterr().err
    assert status == 3 and len(results) == 2 and "RuntimeError: the device fell over" in error
    assert "Traceback" not in error
    monkeypatch.setenv("FLEXRUN_DEBUG", "1")
    llm.engine = FakeEngine(block_size=2, fail_at_step=1)
    with pytest.raises(RuntimeError):
        job()


def test_notes_about_changed_and_orphaned_lines(job, capsys):
    job()
    job.source.write_text('{"id": "r0", "prompt": "other"}\n')
    assert job()[0] == 0
    error = capsys.readouterr().err
    assert "4 results in" in error and "belong to no line" in error and "1 lines of" in error


# -- generate and info --------------------------------------------------------------------------------------


def test_generate_streams_the_text(llm, capsys, monkeypatch):
    pieces = []
    write = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (pieces.append(text), write(text))[1])
    assert main(["generate", "-m", "opt-125m", "--dummy-weights", "hello", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out) == 6 and captured.out.endswith("\n")
    assert len([piece for piece in pieces if piece]) == 6  # one per pass and the line's end
    assert "6 prompt tokens, 5 generated" in captured.err and llm.n_closed == 1


def test_generate_forms(llm, capsys, monkeypatch):
    base = ["generate", "-m", "opt-125m", "--dummy-weights", "--max-tokens", "2", "--json"]
    seen = []
    add = llm.engine.add_request
    monkeypatch.setattr(llm.engine, "add_request", lambda *a: (seen.append(a), add(*a))[1])
    assert main([*base, "--system", "be brief", "hi"]) == 0
    assert seen[-1][3] == "<system>be brief<user>hi<assistant>" and seen[-1][2].seed == 0
    assert main([*base, "--token-ids", "5,6,7", "--n", "2"]) == 0
    assert seen[-1][1] == [5, 6, 7]
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["outputs"]) == 2 and result["generated_tokens"] == 4
    assert main([*base[:-1], "--n", "2", "hi"]) == 2
    assert main([*base, "--token-ids", "--chat", "5"]) == 2
    assert main([*base, "--token-ids", "five"]) == 2
    assert main([*base, "x" * 600]) == 2  # too long for the model
    assert "the model's limit is 512" in capsys.readouterr().err
    llm.tokenizer = None
    assert main([*base, "hi"]) == 2
    assert "--token-ids" in capsys.readouterr().err


def test_info_of_a_preset(capsys):
    assert main(["info", "opt-125m", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["parameters"] == 125_239_296 and info["tied_embeddings"] is True
    assert (info["n_layers"], info["hidden_size"], info["vocab_size"]) == (12, 768, 50272)
    assert info["kv_bytes_per_token"] == 2 * 12 * 768 * 2
    # Every weight of a dense tied model is used once per token, apart from positions, norms and biases.
    assert abs(info["flops_per_token"] / (2 * info["parameters"]) - 1) < 0.02
    assert main(["info", "opt-125m"]) == 0
    assert "125,239,296" in capsys.readouterr().out
    assert main(["info", "no-such-model"]) == 2


def test_info_needs_no_torch():
    code = (
        "import sys; from flexrun.__main__ import main\n"
        "assert main(['info', 'llama-2-7b', '--json']) == 0\n"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == 6_738_415_616


# -- errors and signals -------------------------------------------------------------------------------------


def test_errors_in_one_sentence():
    assert explain(ValueError("bad top_p")) == "bad top_p" and is_refusal(ValueError("x"))
    assert explain(FileNotFoundError(2, "No such file", "a.txt")) == "a.txt: No such file"
    assert explain(OutputError(28, "disk full")) == "disk full" and not is_refusal(OutputError(28, "x"))
    assert is_refusal(OutputRefusedError(11, "another run"))
    assert explain(KeyError("x")).startswith("KeyError: 'x'") and not is_refusal(KeyError("x"))
    assert "out of memory" in explain(MemoryError()) and not is_refusal(MemoryError())


def test_a_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "flexrun", "info", "opt-125m", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE and done.stderr == b""


def test_the_first_signal_asks_and_the_second_ends(capsys):
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(KeyboardInterrupt), StopRequest() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second signal went unheard")
    assert signal.getsignal(signal.SIGINT) is before and "stopping after" in capsys.readouterr().err
    assert threading.current_thread() is threading.main_thread()
