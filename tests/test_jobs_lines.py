import io
import json

import pytest

from flexrun.jobs.ids import IdTable, hash64
from flexrun.jobs.lines import LineError, identify, own_id, parse_object, read_lines


def lines(data, **kwargs):
    return list(read_lines(io.BytesIO(data), **kwargs))


def test_splits_at_newline_only_and_counts_blank_lines():
    data = '{"a": "x\u2028y\x85z"}\n\n  \r\n{"b": 1}\r\n{"c": "\x0b\x1c"}'.encode()
    found = lines(data)
    assert [line.number for line in found] == [1, 4, 5]
    assert found[0].data.decode() == '{"a": "x\u2028y\x85z"}'
    assert found[1].data == b'{"b": 1}'
    assert found[-1].end_offset == len(data)


def test_byte_order_mark_is_dropped_once():
    found = lines(b'\xef\xbb\xbf{"a": 1}\n\xef\xbb\xbf{"a": 1}\n')
    assert parse_object(found[0]) == {"a": 1}
    with pytest.raises(LineError):
        parse_object(found[1])


def test_a_line_beyond_the_limit_is_skipped_without_holding_it():
    class Endless(io.RawIOBase):
        """A stream of one 50 MB line and a short one, made as it is read."""

        left = 50_000_000
        tail = b'\n{"a": 1}\n'

        def readable(self):
            return True

        def readinto(self, buffer):
            if self.left > 0:
                n = min(len(buffer), self.left)
                self.left -= n
                buffer[:n] = b"x" * n
                return n
            n = min(len(buffer), len(self.tail))
            buffer[:n] = self.tail[:n]
            self.tail = self.tail[n:]
            return n

    import tracemalloc

    tracemalloc.start()
    found = list(read_lines(io.BufferedReader(Endless()), max_line_bytes=1000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8_000_000
    assert [(line.number, line.too_long, line.size_bytes) for line in found] == [
        (1, True, 50_000_001),
        (2, False, 9),
    ]
    with pytest.raises(LineError, match="50000001 bytes, the limit is 1000"):
        parse_object(found[0], max_line_bytes=1000)


def test_a_line_of_exactly_the_limit_is_read():
    assert not lines(b"x" * 10 + b"\n" + b"y" * 10, max_line_bytes=10)[0].too_long
    assert lines(b"x" * 11, max_line_bytes=10)[0].too_long


@pytest.mark.parametrize(
    "data, words",
    [
        (b"nonsense", "not valid JSON.*character 1"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1}}', "not valid JSON"),
        (b"[1, 2]", "must be a JSON object, found an array"),
        (b'"text"', "found a string"),
        (b"null", "found null"),
        (b"3", "found a number"),
        (b"true", "found a boolean"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": "\xff"}', "not valid UTF-8.*byte 8"),
        ('{"a": 1}'.encode("utf-16"), "convert it to UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON here"),
        (b"\x00\x00\x00", "not valid JSON"),
    ],
)
def test_bad_lines_say_what_is_wrong(data, words):
    with pytest.raises(LineError, match=words):
        parse_object(lines(data)[0])


def test_surrogate_pairs_are_fine():
    assert parse_object(lines(b'{"a": "\\ud83d\\ude00"}')[0]) == {"a": "\U0001f600"}


def test_own_id():
    assert own_id({"custom_id": "a"}) == own_id({"id": "a"}) == own_id({"id": "a", "custom_id": "a"}) == "a"
    assert own_id({"id": 7}) == "7"
    assert own_id({"custom_id": None}) is None
    for bad in (
        {"id": ""},
        {"id": True},
        {"custom_id": []},
        {"custom_id": 1.5},
        {"id": "a", "custom_id": "b"},
    ):
        with pytest.raises(LineError):
            own_id(bad)


def test_every_line_gets_exactly_one_name():
    ids = IdTable()
    given = ["a", None, "line-4", None, "a", "line-2", "line-7", None, "line-8-2"]
    found = []
    for line, custom_id in zip(lines(b"{}\n" * len(given)), given, strict=True):
        identity, duplicate = identify(line, custom_id, ids)
        found.append((identity.custom_id, identity.derived, duplicate))
    assert found == [
        ("a", False, False),
        ("line-2", True, False),
        ("line-4", False, False),
        ("line-4-2", True, False),
        ("line-5", True, True),
        ("line-6", True, True),
        ("line-7", False, False),
        ("line-8", True, False),
        ("line-8-2", False, False),
    ]


def test_id_table_against_a_dict():
    table = IdTable()
    for i in range(20_000):
        if i % 3:
            assert table.mark_seen(f"id {i}")
            assert not table.mark_seen(f"id {i}")
        if i % 2:
            assert table.mark_done(f"id {i}", i, failed=i % 5 == 0)
            assert not table.mark_done(f"id {i}", 0)
    assert table.n_done == 10_000 and table.n_failed == sum(1 for i in range(1, 20_000, 2) if i % 5 == 0)
    assert table.nbytes / len(table) < 48
    for i in range(0, 20_000, 7):
        assert table.is_seen(f"id {i}") == bool(i % 3)
        assert table.done_content(f"id {i}") == (i if i % 2 else None)
        assert table.is_failed(f"id {i}") == (i % 2 == 1 and i % 5 == 0)
    assert not table.is_seen("stranger") and table.done_content("stranger") is None


def test_hash_is_stable_and_never_zero():
    assert hash64(b"flexrun") == hash64(b"flexrun") != hash64(b"flexruN")
    assert json.loads(json.dumps(hash64(b""))) > 0
