"""Files of samples, one JSON object per line: read line by line, and refused in one sentence."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PyramidKVError
from ..records import parse_json

_REQUIRED: Any = object()


class DataError(PyramidKVError):
    """A file of samples that cannot be used; the message names file, line and reason."""


@dataclass(frozen=True)
class Line:
    """One line of a file: an object whose fields are checked when they are read.

    Attributes:
        path: the file, perhaps in an archive.
        number: of the line, from 1.
        fields: the object.
    """

    path: Path | zipfile.Path
    number: int
    fields: dict[str, Any]

    def error(self, reason: str) -> DataError:
        """Return an error that says where; the reason goes on from the file's name."""
        return DataError(f"line {self.number} of {str(self.path)!r} {reason}")

    def text(self, name: str, default: str = _REQUIRED) -> str:
        """Return a field that is a text.

        Raises:
            DataError: it is missing without a default, no text, or cannot be encoded.
        """
        return self._checked(name, self._get(name, default))

    def texts(self, name: str, default: tuple[str, ...] = _REQUIRED) -> tuple[str, ...]:
        """Return a field that is a list of texts.

        Raises:
            DataError: it is missing without a default, no list, empty, or holds something else.
        """
        if default is not _REQUIRED and name not in self.fields:
            return default
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list):
            raise self.error(f"has in {name!r} {_kind(value)}; a list of texts is needed")
        if not value:
            raise self.error(f"has in {name!r} an empty list; at least one text is needed")
        return tuple(self._checked(name, item) for item in value)

    def count(self, name: str, default: int = _REQUIRED) -> int:
        """Return a field that is a whole number of at least 1.

        Raises:
            DataError: it is missing without a default, or something else.
        """
        value = self._get(name, default)
        if type(value) is not int or value < 1:
            shown = value if type(value) in (int, float) else _kind(value)
            raise self.error(f"has in {name!r} {shown}; a whole number of at least 1 is needed")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name, default)
        if value is _REQUIRED:
            present = ", ".join(map(repr, self.fields)) or "none"
            raise self.error(f"has no field {name!r}; its fields are: {present}")
        return value

    def _checked(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.error(f"has in {name!r} {_kind(value)} where a text is needed")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.error(
                f"has in {name!r} no valid text: half a surrogate pair at character {error.start}"
            ) from None
        return value


def read_lines(path: Path | zipfile.Path, limit: int | None = None) -> Iterator[Line]:
    """Yield the lines of a file, the first `limit` of them or all; no more is read.

    Raises:
        DataError: the file cannot be read or has no lines, or a line is empty, not UTF-8, not JSON
            or no object.
    """
    if limit is not None and (type(limit) is not int or limit < 1):
        raise DataError(f"the number of samples is {limit!r}; it must be at least 1")
    name = repr(str(path))
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is no plain file; give a file with one JSON object per line")
    number = 0
    try:
        with path.open("rb") as file:
            for number, data in enumerate(file, 1):
                if limit is not None and number > limit:
                    return
                yield _parse(path, number, data)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {name}: {reason}") from None
    if not number:
        raise DataError(f"{name} is empty; give a file with one JSON object per line")


def _parse(path: Path | zipfile.Path, number: int, data: bytes) -> Line:
    line = Line(path, number, {})
    if not data.strip():
        raise line.error("is empty; delete it")
    try:
        value = parse_json(data, "utf-8-sig" if number == 1 else "utf-8")
    except ValueError as error:
        raise line.error(str(error)) from None
    if not isinstance(value, dict):
        raise line.error(f"holds {_kind(value)}; a JSON object is needed")
    return Line(path, number, value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}
    return names.get(type(value), "a number")
