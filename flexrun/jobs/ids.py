"""Which ids a job has seen and which are done, in a few bytes each.

A job may have millions of lines, so ids are kept as 64-bit hashes in flat arrays: at most 40 bytes per id
(13 MB per million while the table is not growing), where a Python set of strings takes 150 and more. Two
different ids share a hash with a probability of about n^2 / 2^65: 3e-8 for a million ids.
"""

from __future__ import annotations

import hashlib
from array import array

_DONE, _SEEN, _FAILED = 1, 2, 4


def hash64(data: bytes) -> int:
    """A 64-bit hash that is the same in every process; never 0."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


class IdTable:
    """An open-addressing hash table: id -> flags and the hash of the line that a done id came from."""

    def __init__(self) -> None:
        self._used = 0
        self._allocate(1024)
        self.n_done = 0
        self.n_failed = 0

    def __len__(self) -> int:
        return self._used

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return len(self._flags) * (8 + 8 + 1)

    def _allocate(self, size: int) -> None:
        self._keys = array("Q", bytes(8 * size))
        self._contents = array("Q", bytes(8 * size))
        self._flags = bytearray(size)
        self._mask = size - 1

    def _slot(self, key: int) -> int:
        """Where `key` is, or the empty place where it belongs."""
        keys, mask = self._keys, self._mask
        slot = key & mask
        while keys[slot] and keys[slot] != key:
            slot = (slot + 1) & mask
        return slot

    def _claim(self, custom_id: str) -> int:
        key = hash64(custom_id.encode())
        slot = self._slot(key)
        if self._keys[slot]:
            return slot
        if self._used * 4 >= 3 * len(self._flags):  # beyond 3/4 full, probe chains grow long
            self._grow()
            slot = self._slot(key)
        self._keys[slot] = key
        self._used += 1
        return slot

    def _grow(self) -> None:
        keys, contents, flags = self._keys, self._contents, self._flags
        self._allocate(2 * len(flags))
        for old, key in enumerate(keys):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._contents[slot] = key, contents[old]
                self._flags[slot] = flags[old]

    def mark_done(self, custom_id: str, content: int, failed: bool = False) -> bool:
        """Note a result found in the output, made from a line of hash `content`. False if known already."""
        slot = self._claim(custom_id)
        if self._flags[slot] & _DONE:
            return False
        self._flags[slot] |= _DONE | (_FAILED if failed else 0)
        self._contents[slot] = content
        self.n_done += 1
        self.n_failed += failed
        return True

    def mark_seen(self, custom_id: str) -> bool:
        """Note an id of the input. False if an earlier line had it."""
        slot = self._claim(custom_id)
        if self._flags[slot] & _SEEN:
            return False
        self._flags[slot] |= _SEEN
        return True

    def is_seen(self, custom_id: str) -> bool:
        return bool(self._flags[self._slot(hash64(custom_id.encode()))] & _SEEN)

    def done_content(self, custom_id: str) -> int | None:
        """Hash of the line that this id's result was made from, None if it is not done."""
        slot = self._slot(hash64(custom_id.encode()))
        return self._contents[slot] if self._flags[slot] & _DONE else None

    def is_failed(self, custom_id: str) -> bool:
        """True for a done id whose result is an error record."""
        return bool(self._flags[self._slot(hash64(custom_id.encode()))] & _FAILED)
