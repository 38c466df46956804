"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from flexrun.checkpoint import staging
from flexrun.checkpoint.staging import StagedFolder, exclusive, remove_leftovers, write_file


def test_a_folder_appears_with_its_name(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "x"
    with StagedFolder(target) as staged:
        write_file(staged.path / "a", b"1")
        assert not target.exists()
        staged.publish()
    assert [file.name for file in target.iterdir()] == ["a"]
    assert list(target.parent.iterdir()) == [target]


def test_without_publishing_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(KeyError), StagedFolder(tmp_path / "x") as staged:
        write_file(staged.path / "a", b"1")
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_folder_of_that_name_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    with StagedFolder(tmp_path / "x") as staged:
        write_file(staged.path / "new", b"new")
        staged.publish()
    assert [file.name for file in (tmp_path / "x").iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]


def test_a_failed_rename_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").write_text("old")
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if to == target and not self.name.endswith("-old"):
            raise OSError("no")
        return rename(self, to)

    with pytest.raises(OSError, match="no"), StagedFolder(target) as staged:
        monkeypatch.setattr(Path, "rename", failing)
        staged.publish()
    assert (target / "old").read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_leftovers_are_told_from_work_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead process leaves a lock file that nobody holds; without one, age decides."""
    dead, fresh = tmp_path / ".x[1].packing-1-a", tmp_path / ".x[1].packing-2-b"
    dead.mkdir()
    (dead / ".lock").touch()
    fresh.mkdir()
    others = [tmp_path / ".x1.packing-1-a", tmp_path / "x[1]"]
    for other in others:
        other.mkdir()
    with StagedFolder(tmp_path / "x[1]") as staged:
        assert not dead.exists() and fresh.exists() and staged.path.exists()
        remove_leftovers(tmp_path / "x[1]")
        assert staged.path.exists() and all(other.exists() for other in others)
    monkeypatch.setattr(staging, "_GRACE_SECONDS", 0.0)
    remove_leftovers(tmp_path / "x[1]")
    assert not fresh.exists() and all(other.exists() for other in others)


def test_exclusive_waits_for_its_holder(tmp_path: Path) -> None:
    ready, done = os.pipe()
    with exclusive(tmp_path / "sub" / "lock"):
        child = os.fork()
        if child == 0:
            with exclusive(tmp_path / "sub" / "lock"):
                os.write(done, b"x")
            os._exit(0)
        os.set_blocking(ready, False)
        time.sleep(0.2)
        with pytest.raises(BlockingIOError):
            os.read(ready, 1)
    os.waitpid(child, 0)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(done)
