import errno
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs_fake import read_results

from flexrun.jobs.ids import IdTable
from flexrun.jobs.lines import LineIdentity
from flexrun.jobs.manifest import SettingsError, check_settings, manifest_path, write_manifest
from flexrun.jobs.output import (
    JobOutput,
    OutputError,
    OutputRefusedError,
    StreamSink,
    encode_record,
    error_record,
    success_record,
)


def identity(custom_id, number=1):
    return LineIdentity(custom_id=custom_id, number=number, content=number, derived=False)


def write(path, records):
    with JobOutput(path) as output:
        for record in records:
            output.append(record)
        output.sync()


RECORDS = [
    success_record(identity("a", 1), {"text": "plain"}),
    error_record(identity("b", 2), "invalid_json", "not valid"),
    success_record(identity("ç\u2028", 3), {"text": "é\u2028\x85 \U0001f600 \n"}),
]


def test_records_have_the_batch_form_and_one_line_each():
    good, bad, odd = RECORDS
    assert good["response"]["status_code"] == 200 and good["error"] is None
    assert bad["response"] is None and bad["error"]["line"] == 2
    assert bad["error"]["message"] == "line 2: not valid"
    data = encode_record(odd)
    assert data.count(b"\n") == 1 and len(data.decode().splitlines()) == 1
    assert json.loads(data) == odd
    with pytest.raises(ValueError):
        encode_record({"logprob": float("nan")})


def test_a_last_line_torn_at_any_byte_is_repaired(tmp_path):
    whole = b"".join(encode_record(record) for record in RECORDS)
    last = len(encode_record(RECORDS[-1]))
    path = tmp_path / "out.jsonl"
    for kept in range(len(whole) - last, len(whole) + 1):
        path.write_bytes(whole[:kept])
        ids = IdTable()
        with JobOutput(path) as output:
            output.recover(ids)
            complete = kept >= len(whole) - 1  # only the newline is missing: the result itself is whole
            assert path.read_bytes() == (whole if complete else whole[: len(whole) - last])
            assert (ids.done_content("ç\u2028") is not None) == complete
            assert ids.n_done == 2 + complete and ids.n_failed == 1
            output.append(success_record(identity("next", 9), {}))
        assert list(read_results(path))[-1] == "next"


def test_a_file_of_one_torn_line_becomes_empty(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(encode_record(RECORDS[0])[:10])
    with JobOutput(path) as output:
        output.recover(IdTable())
        assert output.size_bytes == 0


def test_a_tail_of_zeros_after_a_power_failure_is_removed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(encode_record(RECORDS[0]) + bytes(500))
    with JobOutput(path) as output:
        output.recover(IdTable())
    assert path.read_bytes() == encode_record(RECORDS[0])


@pytest.mark.parametrize(
    "bad",
    [
        b"hello\n",
        b'{"custom_id": "x"}\n',
        b"[1]\n",
        b'{"custom_id": 3, "id": "1", "response": null, "error": 1}\n',
    ],
)
def test_a_foreign_line_is_refused_and_nothing_is_changed(tmp_path, bad):
    path = tmp_path / "out.jsonl"
    data = encode_record(RECORDS[0]) + bad + encode_record(RECORDS[1])[:-4]
    path.write_bytes(data)
    with JobOutput(path) as output, pytest.raises(OutputRefusedError, match="line 2, is not a result"):
        output.recover(IdTable())
    assert path.read_bytes() == data


def test_retry_failed_removes_error_records_only(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, RECORDS)
    path.chmod(0o640)
    ids = IdTable()
    with JobOutput(path) as output:
        output.recover(ids, retry_failed=True)
        assert ids.done_content("b") is None and ids.n_failed == 0
        with pytest.raises(OutputError, match="another run"):  # the new file is locked as the old one was
            JobOutput(path)
        output.append(success_record(identity("b", 2), {}))
    assert list(read_results(path)) == ["a", "ç\u2028", "b"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_two_runs_cannot_write_one_output(tmp_path):
    path = tmp_path / "out.jsonl"
    with JobOutput(path), pytest.raises(OutputRefusedError, match="another run is writing"):
        JobOutput(path)
    JobOutput(path).close()


def test_bad_places_are_refused(tmp_path):
    with pytest.raises(OutputError, match=r"folder of the output .* does not exist"):
        JobOutput(tmp_path / "missing" / "out.jsonl")
    with pytest.raises(OutputError, match="cannot open"):
        JobOutput(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="not a regular file"):
        JobOutput(tmp_path / "pipe")


def test_too_little_free_space_is_refused_at_once(tmp_path, monkeypatch):
    class Info:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: Info)
    with pytest.raises(OutputRefusedError, match="only 40960 bytes are free") as caught:
        JobOutput(tmp_path / "out.jsonl")
    assert caught.value.errno == errno.ENOSPC


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """A file-size limit stands for the full disk: the kernel then writes a part of the line, too."""
    path = tmp_path / "out.jsonl"
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import resource
from test_jobs_output import RECORDS, identity, success_record, JobOutput, OutputError
output = JobOutput({str(path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    for i in range(100):
        output.append(success_record(identity(f"id-{{i}}", i), {{"text": "x" * 100}}))
except OutputError as error:
    print(i, error)
    try:
        output.append(success_record(identity("large"), {{"text": "x" * 1000}}))
    except OutputError:
        output.sync()
        sys.exit(0)
sys.exit("no error")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "results before" in done.stdout and "File too large" in done.stdout
    n_written = int(done.stdout.split()[0])
    assert 0 < n_written < 10 and list(read_results(path)) == [f"id-{i}" for i in range(n_written)]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_stream_sink_writes_lines_and_reports_a_closed_pipe():
    reader, writer = os.pipe()
    sink = StreamSink(writer, "the pipe")
    sink.append(RECORDS[0])
    sink.sync()
    assert os.read(reader, 10_000) == encode_record(RECORDS[0])
    os.close(reader)
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        with pytest.raises(OutputError, match="cannot write to the pipe"):
            sink.append(RECORDS[0])
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(writer)


SETTINGS = {"model": "abc", "dtype": "float32", "sampling": {"temperature": 0.7}, "formats": ("auto", "auto")}


def test_equal_settings_go_on_and_other_settings_are_named(tmp_path):
    path = tmp_path / "out.jsonl"
    with JobOutput(path) as output:
        check_settings(output, "batch", SETTINGS)
        write_manifest(output, "batch", SETTINGS)
        output.append(RECORDS[0])
    written = manifest_path(path).stat().st_mtime_ns
    with JobOutput(path) as output:
        check_settings(output, "batch", SETTINGS)
        check_settings(output, "batch", {"model": "abc"})  # what is known before loading
        write_manifest(output, "batch", SETTINGS)
        changed = {**SETTINGS, "dtype": "bfloat16", "sampling": {}, "seed": 1}
        with pytest.raises(SettingsError) as caught:
            check_settings(output, "batch", changed)
        for words in ('dtype was "float32", now "bfloat16"', 'sampling was {"temperature": 0.7}, now {}',
                      "seed was not set, now 1", "--overwrite"):  # fmt: skip
            assert words in str(caught.value)
        assert "model" not in str(caught.value).split(":")[1].split(" was ")[0]
        with pytest.raises(SettingsError, match="'flexrun batch', not of 'flexrun score'"):
            check_settings(output, "score", SETTINGS)
        output.truncate()
        check_settings(output, "batch", changed)
        write_manifest(output, "batch", changed)
        assert json.loads(manifest_path(path).read_text())["settings"]["seed"] == 1
    assert manifest_path(path).stat().st_mtime_ns > written


def test_an_output_without_a_usable_manifest_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, RECORDS)
    with JobOutput(path) as output:
        with pytest.raises(SettingsError, match="not its manifest"):
            check_settings(output, "batch", SETTINGS)
        for text, words in (("{", "cannot be read"), ("[]", "not the manifest"),
                            ('{"version": 99, "kind": "batch", "settings": {}}', "version 99")):  # fmt: skip
            manifest_path(path).write_text(text)
            with pytest.raises(SettingsError, match=words):
                check_settings(output, "batch", SETTINGS)
        write_manifest(output, "batch", SETTINGS)  # --overwrite replaces even a broken one
        check_settings(output, "batch", SETTINGS)
