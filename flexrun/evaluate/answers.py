"""Many requests at once, each answered by a journal or by the engine, in the order in which they land."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flexrun.evaluate.journal import Forgetful, Journal
from flexrun.jobs.kinds import EnginePrompt, JobEngine
from flexrun.request import RequestOutput
from flexrun.scoring import run_prompts

logger = logging.getLogger(__name__)


class Answering:
    """Runs items of one or more prompts; what is asked twice is computed once.

    Args:
        engine: does the work.
        journal: keeps each value as it lands, and answers what it knows.

    n_computed counts engine requests; the others came from the journal.
    """

    def __init__(self, engine: JobEngine, journal: Journal | Forgetful) -> None:
        self._engine = engine
        self._journal = journal
        self._calls = itertools.count()
        self.n_computed = 0

    def run(
        self,
        items: Sequence[Sequence[EnginePrompt]],
        value_of: Callable[[EnginePrompt, RequestOutput], Any],
        *,
        progress: Callable[[int, int], None] = lambda n_done, n_total: None,
    ) -> Iterator[tuple[int, list[Any]]]:
        """(index of an item, a value per prompt of it) in the pass that ends it.

        value_of: what is kept of an output; anything that JSON can hold, not None. progress: requests done
        and all of them, of different content.
        """
        wanted: dict[str, list[tuple[int, int]]] = {}
        prompts: dict[str, EnginePrompt] = {}
        values: list[list[Any]] = [[None] * len(item) for item in items]
        n_missing = [len(item) for item in items]
        done = [i for i, item in enumerate(items) if not item]

        def land(key: str, value: Any) -> None:
            for i, j in wanted.pop(key):
                values[i][j] = value
                n_missing[i] -= 1
                if not n_missing[i]:
                    done.append(i)

        for i, item in enumerate(items):
            for j, prompt in enumerate(item):
                key = self._journal.key(prompt)
                wanted.setdefault(key, []).append((i, j))
                prompts.setdefault(key, prompt)
        for key in prompts:
            value = self._journal.get(key)
            if value is not None:
                land(key, value)
        n_total, todo = len(prompts), [(key, prompts[key]) for key in prompts if key in wanted]
        if len(todo) < n_total:
            logger.info("%d of %d requests were in the journal", n_total - len(todo), n_total)
        n_landed = n_total - len(todo)
        progress(n_landed, n_total)
        yield from self._drain(done, values)
        work = (((key, prompt), [prompt]) for key, prompt in todo)
        for (key, prompt), outputs in run_prompts(self._engine, work, name=f"eval-{next(self._calls)}"):
            value = value_of(prompt, outputs[0])
            self._journal.put(key, value)
            self.n_computed += 1
            land(key, value)
            n_landed += 1
            progress(n_landed, n_total)
            yield from self._drain(done, values)

    @staticmethod
    def _drain(done: list[int], values: list[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        while done:
            i = done.pop()
            yield i, values[i]
