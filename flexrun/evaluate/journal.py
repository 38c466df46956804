"""A journal of finished evaluation requests, so that a killed evaluation goes on where it was.

One JSON line per result: {"key": ..., "value": ...}. The key is a hash of everything that the result depends
on (model, precision, formats, token ids, sampling), so a journal may serve any number of runs, tasks and
settings at once; a result is found again wherever the same question is asked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexrun.jobs.output import JobOutput, OutputRefusedError

if TYPE_CHECKING:
    from flexrun.jobs.kinds import EnginePrompt
    from flexrun.llm import LLM

logger = logging.getLogger(__name__)

AUTO_JOURNAL = "auto"


class Journal:
    """Results by key, kept in a file; several processes must not write one at once (it is locked).

    Raises:
        OutputRefusedError: the file cannot be used (locked by another run, no folder, disk full).
        ValueError: the file is not a journal.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
        self._settings = json.dumps(dict(settings), sort_keys=True, default=str).encode()
        self._values: dict[str, Any] = {}
        self._output = JobOutput(path)
        try:
            self._load()
        except BaseException:
            self._output.close()
            raise

    @property
    def path(self) -> Path:
        return self._output.path

    def __len__(self) -> int:
        return len(self._values)

    def _load(self) -> None:
        whole_bytes = 0
        with open(self.path, "rb") as stream:
            for number, data in enumerate(stream, 1):
                if not data.endswith(b"\n"):  # torn by a kill: that request runs again
                    logger.warning("%s: incomplete last line removed", self.path)
                    break
                try:
                    record = json.loads(data)
                    self._values[record["key"]] = record["value"]
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{self.path}, line {number}, is not an entry of a journal; give another file"
                    ) from None
                whole_bytes += len(data)
        if whole_bytes < self._output.size_bytes:
            os.truncate(self.path, whole_bytes)

    def key(self, prompt: EnginePrompt) -> str:
        """The name of a request's result."""
        asked: dict[str, Any] = {"ids": prompt.token_ids, "from": prompt.score_from}
        if prompt.score_from is None:
            asked["params"] = prompt.params.to_dict()
        data = json.dumps(asked, sort_keys=True).encode()
        return hashlib.blake2b(self._settings + b"\0" + data, digest_size=16).hexdigest()

    def get(self, key: str) -> Any:
        """The value kept for a key, None if there is none."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value that JSON can hold. Raises OutputError if the disk is full or failing."""
        self._output.append({"key": key, "value": value})
        self._values[key] = value

    def close(self) -> None:
        """Bring everything to the disk and let go of the file."""
        self._output.sync()
        self._output.close()


class Forgetful:
    """A journal that keeps nothing."""

    def key(self, prompt: EnginePrompt) -> str:
        return repr((prompt.token_ids, prompt.score_from, prompt.params))

    def get(self, key: str) -> Any:
        return None

    def put(self, key: str, value: Any) -> None:
        pass

    def close(self) -> None:
        pass


def journal_settings(llm: LLM) -> dict[str, Any]:
    """What results depend on besides their prompts: weights, precision, formats, tokenizer."""
    tokenizer = llm.tokenizer
    text = "" if tokenizer is None else f"{tokenizer.eos_token_ids}{tokenizer.backend.to_str()}"
    return {
        "model": llm.opened.fingerprint,
        "dtype": str(llm.runtime.executor.compute_dtype),
        "weight_format": llm.policy.weight_format,
        "cache_format": llm.policy.cache_format,
        "tokenizer": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    }


def open_journal(path: str | os.PathLike[str] | None, llm: LLM) -> Journal | Forgetful:
    """The journal of an evaluation: a file; "auto" for the model's own in the user's cache folder; or none.

    Where the model's own is in use by another run, nothing is kept, with a warning.
    """
    if path is None:
        return Forgetful()
    settings = journal_settings(llm)
    if path != AUTO_JOURNAL:
        return Journal(path, settings)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexrun" / "journals"
    base.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=8).hexdigest()
    try:
        return Journal(base / f"{digest}.jsonl", settings)
    except OutputRefusedError as error:
        logger.warning("no journal is kept: %s", error.strerror or error)
        return Forgetful()
