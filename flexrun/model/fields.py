"""Reading configuration fields so that nothing goes unnoticed: what is not asked for has to be harmless."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from flexrun.model.schema import ModelConfigError

_MISSING: Any = object()


class Fields:
    """A mapping that remembers which of its keys were asked for.

    Getters take alternative names of one field and return the first that is present and not null; without
    one, the default. Errors are ModelConfigError and name the field.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str = "config.json") -> None:
        self._values = values
        self._asked: set[str] = set()
        self._where = where

    def raw(self, *names: str, default: Any = None) -> Any:
        """The value as it is."""
        self._asked.update(names)
        for name in names:
            if self._values.get(name) is not None:
                return self._values[name]
        if default is _MISSING:
            raise ModelConfigError(f"{self._where} has no {' or '.join(names)}, which this model needs")
        return default

    def has(self, name: str) -> bool:
        """Whether the field is present and not null (does not count as asking for it)."""
        return self._values.get(name) is not None

    def mentions(self, name: str) -> bool:
        """Whether the field is present, be it null (does not count as asking for it)."""
        return name in self._values

    def integer(self, *names: str, default: Any = _MISSING, minimum: int = 1) -> int:
        """A whole number of at least `minimum`. A default is returned as it is."""
        value = self.raw(*names, default=default)
        if value is default:
            return value
        whole = isinstance(value, float) and value.is_integer()
        if isinstance(value, bool) or not (isinstance(value, int) or whole) or value < minimum:
            raise self.error(names[0], f"must be a whole number of at least {minimum}", value)
        return int(value)

    def number(self, *names: str, default: Any = _MISSING) -> float:
        """A finite number. A default is returned as it is."""
        value = self.raw(*names, default=default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(names[0], "must be a finite number", value)
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.raw(*names, default=default)
        if not isinstance(value, bool):
            raise self.error(names[0], "must be true or false", value)
        return value

    def text(self, *names: str, default: Any = _MISSING) -> str:
        value = self.raw(*names, default=default)
        if value is not default and not isinstance(value, str):
            raise self.error(names[0], "must be a string", value)
        return value

    def numbers(self, *names: str, default: Any = _MISSING) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self.raw(*names, default=default)
        if value is default:
            return value
        good = isinstance(value, list | tuple) and all(
            isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
            for item in value
        )
        if not good:
            raise self.error(names[0], "must be a list of numbers", value)
        return tuple(float(item) for item in value)

    def fixed(self, name: str, *accepted: Any) -> None:
        """The field, where present, must have one of the accepted values."""
        value = self.raw(name)
        if value is not None and value not in accepted:
            choices = " or ".join(repr(item) for item in accepted)
            raise self.error(name, f"only {choices} is supported", value)

    def error(self, name: str, problem: str, value: Any) -> ModelConfigError:
        shown = repr(value)
        return ModelConfigError(
            f"{self._where}: {name} {problem}, found {shown if len(shown) < 80 else shown[:77] + '...'}"
        )

    def refuse_unknown(self, harmless: Collection[str], family: str, prefix: str = "") -> None:
        """Raise if a field that nobody asked for, and that is not known as harmless, is set.

        Null, false, zero, empty and one are taken as "off". Keys that start with "_" are the writer's own.
        Only keys that start with `prefix` are looked at.
        """
        unknown = [
            name
            for name, value in self._values.items()
            if name.startswith(prefix)
            and name not in self._asked
            and name not in harmless
            and not name.startswith("_")
            and not _is_neutral(value)
        ]
        if unknown:
            found = ", ".join(f"{name}={self._values[name]!r:.60}" for name in sorted(unknown))
            raise ModelConfigError(
                f"{self._where} sets fields that flexrun does not know for {family} and that may change the "
                f"result: {found}. If they do not matter, remove them from a copy of the file"
            )


def _is_neutral(value: Any) -> bool:
    if value is None or value is False:
        return True
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value in (0, 1)
    return isinstance(value, str | list | tuple | dict) and not value
