"""Reading what users give on the command line, and refusing it in one sentence."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PyramidKVError
from ..records import replacing, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class InputError(PyramidKVError):
    """Something given on the command line cannot be used."""


def read_prompt(prompt: str | None, prompt_file: Path | None, source: str | None) -> str:
    """Return the prompt from the one place it was given in.

    Raises:
        InputError: none or several places, an unreadable file, or text that is not UTF-8.
    """
    given = [value for value in (prompt, prompt_file, source) if value is not None]
    if len(given) != 1:
        raise InputError(
            "give the prompt once: --prompt TEXT, --prompt-file FILE, or - for standard input; "
            f"{len(given) or 'none'} given"
        )
    if source is not None and source != "-":
        raise InputError(
            f"unexpected argument {source!r}; use - for standard input, or --prompt for text"
        )
    if prompt is not None:
        return prompt
    return read_text(Path("-") if prompt_file is None else prompt_file)


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file, or of standard input if the path is `-`.

    Raises:
        InputError: it cannot be read or is not UTF-8.
    """
    if str(path) == "-":
        closed = sys.stdin is None
        return "" if closed else _decode(sys.stdin.buffer.read(), "standard input")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    return _decode(data, repr(str(path)))


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text (byte {error.start}); convert it to UTF-8 first"
        ) from None


def check_files(
    written: Mapping[str, Path | None],
    read: Iterable[Path | None] = (),
    model: str | None = None,
) -> None:
    """Refuse files that could not be written or would destroy others, before any work.

    Args:
        written: what is to be written, by the option it was given with.
        read: what is read.
        model: what the model was given as.

    Raises:
        InputError: a file is no plain file, has no folder that can be written to, is read, is the
            same as another, or belongs to the model.
    """
    sources = {path.resolve() for path in read if path is not None}
    taken: dict[Path, str] = {}
    for option, path in written.items():
        if path is None:
            continue
        _check_can_write(path)
        target = path.resolve()
        if target in sources:
            raise InputError(f"{option} {str(path)!r} is the file that is read; name another")
        if target in taken:
            raise InputError(f"{taken[target]} and {option} are both {str(path)!r}; name two files")
        if model is not None and _belongs_to_model(target, Path(model).resolve()):
            raise InputError(f"{str(path)!r} is a file of the model; name another")
        taken[target] = option


def _check_can_write(path: Path) -> None:
    folder = path.resolve().parent
    try:
        if str(path) == "-" or (path.exists() and not path.is_file()):
            raise InputError(f"cannot write {str(path)!r}: it is no plain file; name one")
        if not folder.is_dir():
            raise InputError(f"cannot write {str(path)!r}: it has no folder {str(folder)!r}")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _belongs_to_model(target: Path, model: Path) -> bool:
    inside = model.is_dir() and target.parent == model and target.exists()
    return target == model or inside


def check_picture(path: Path | None) -> None:
    """Refuse a picture that could not be drawn, before any work.

    Raises:
        PlotError: it is none of the formats, or matplotlib is missing.
    """
    if path is not None:
        from ..plots import style

        style.check_picture(path)


def write_output(path: Path | None, value: Any) -> None:
    """Write a record if a file was asked for.

    Raises:
        InputError: the file cannot be written.
    """
    if path is not None:
        with _told(path):
            write_json(path, value)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say in a sentence if a file cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from None


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    with _told(path), replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def write_picture(path: Path, figure: Figure) -> None:
    """Write a figure in the format that the file's name says.

    Raises:
        InputError: the file cannot be written.
    """
    from ..plots import style

    with _told(path):
        style.save(figure, path)


def check_seed(seed: int) -> None:
    """Refuse a seed that the random generators cannot take.

    Raises:
        InputError: it is negative or above 2^32 - 1.
    """
    if not 0 <= seed < 2**32:
        raise InputError(f"--seed is {seed}; it must be at least 0 and below 2^32")


_UNITS = {
    f"{prefix}{unit}".lower(): base**power
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("", "k", "M", "G", "T"))
    if unit == "B" or prefix
}


def byte_count(text: str | None, option: str) -> int | None:
    """Read an amount of memory such as `80GB` (10^9 bytes each) or `80GiB` (2^30).

    Raises:
        InputError: it is no number with a unit.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]+)\s*", text)
    size = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or size is None:
        raise InputError(
            f"{option} is {text!r}; give a number with a unit: MB, GB, TB (powers of 1,000) or "
            "MiB, GiB, TiB (powers of 1,024), such as 80GB"
        )
    return int(Fraction(found.group(1)) * size)


def bytes_per_second(text: str | None, option: str) -> int | None:
    """Read a bandwidth such as `3.35TB/s`.

    Raises:
        InputError: it is none.
    """
    if text is not None and not text.rstrip().endswith("/s"):
        raise InputError(f"{option} is {text!r}; give a number with a unit, such as 3350GB/s")
    return byte_count(None if text is None else text.rstrip().removesuffix("/s"), option)


def names(text: str, option: str, example: str) -> list[str]:
    """Read names separated by commas.

    Raises:
        InputError: there is none.
    """
    listed = [name.strip() for name in text.split(",") if name.strip()]
    if not listed:
        raise InputError(f"{option} names nothing; give such as {example}")
    return listed


def named_methods(text: str, option: str) -> list[tuple[str, dict[str, Any]]]:
    """Read `METHOD[:ALLOCATION]`, separated by commas: names, and the options that follow.

    Raises:
        InputError: there is none.
    """
    listed = names(text, option, "snapkv,pyramidkv")
    parts = (item.partition(":") for item in listed)
    return [(name, {"allocation": rule} if rule else {}) for name, _, rule in parts]


def layer_budgets(text: str | None) -> tuple[int, ...] | None:
    """Read a list of layer budgets such as `400,200,100`.

    Raises:
        InputError: it is not a list of whole numbers.
    """
    if text is None:
        return None
    return whole_numbers(text, "--layer-budgets", ", one per full-attention layer")


def head_budgets(path: Path) -> Any:
    """Read a JSON file of budgets of heads; what it says is checked by the method's options.

    Raises:
        InputError: it cannot be read, or is no JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{str(path)!r} is no JSON: {error}") from None


def whole_numbers(text: str, option: str, what: str = "") -> tuple[int, ...]:
    """Read whole numbers separated by commas.

    Raises:
        InputError: they are none.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{option} is {text!r}; give whole numbers separated by commas{what}"
        ) from None
