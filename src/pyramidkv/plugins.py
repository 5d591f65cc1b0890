"""Methods from a user's Python file; without torch, unless the file imports it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .errors import PyramidKVError, raised_in
from .methods import METHODS, Method


class PluginError(PyramidKVError):
    """A file of methods that cannot be used; the message says why."""


@dataclass(frozen=True)
class _Plugin:
    sha256: str
    methods: dict[str, Method]

    @property
    def registered(self) -> bool:
        return all(METHODS.get(name) is method for name, method in self.methods.items())


_loaded: dict[Path, _Plugin] = {}


def load_plugin(path: str | Path) -> list[str]:
    """Run a Python file that registers methods and return their names.

    A file that was loaded before is run again only if its content has changed; then its methods
    take the place of those it registered before. If it fails, the registry is as it was.

    Args:
        path: a .py file that calls `register_method`. Only this file is run: what it imports must
            be installed.

    Raises:
        PluginError: there is no such file, it raised, or it registered nothing.
    """
    path = Path(path)
    data = _read(path)
    digest, home = hashlib.sha256(data).hexdigest(), path.resolve()
    known = _loaded.get(home)
    if known is not None and known.sha256 == digest and known.registered:
        return list(known.methods)
    with _restoring(home):
        for name in known.methods if known is not None else ():
            METHODS.pop(name, None)
        before = dict(METHODS)
        _execute(data, path, home)
        methods = {name: method for name, method in METHODS.items() if name not in before}
        if not methods:
            raise PluginError(
                f"{str(path)!r} registers no method; let it call pyramidkv.register_method"
            )
        _loaded[home] = _Plugin(digest, methods)
    return list(methods)


def describe_plugins(paths: Iterable[str | Path]) -> list[dict[str, str]]:
    """Return name and SHA-256 of loaded files, as they were run, each once; for a record."""
    homes = {Path(path).resolve() for path in paths}
    found = ({"file": home.name, "sha256": _loaded[home].sha256} for home in homes)
    return sorted(found, key=lambda told: (told["file"], told["sha256"]))


def _read(path: Path) -> bytes:
    if path.suffix != ".py":
        raise PluginError(f"{str(path)!r} is no .py file; give the Python file of your method")
    try:
        if not path.is_file():
            raise PluginError(
                f"there is no file {str(path)!r}; give the Python file of your method"
            )
        return path.read_bytes()
    except OSError as error:
        raise PluginError(f"cannot read {str(path)!r}: {error.strerror}") from None


@contextmanager
def _restoring(home: Path) -> Iterator[None]:
    """Leave registry and modules as they were if the block fails, however it fails."""
    methods, name = dict(METHODS), _module_name(home)
    module = sys.modules.get(name)
    try:
        yield
    except BaseException:
        METHODS.clear()
        METHODS.update(methods)
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
        raise


def _module_name(home: Path) -> str:
    return f"pyramidkv_plugin_{hashlib.sha256(os.fsencode(home)).hexdigest()[:16]}"


def _execute(data: bytes, path: Path, home: Path) -> None:
    module = ModuleType(_module_name(home))
    module.__file__ = str(home)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    try:
        exec(compile(data, str(home), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{str(path)!r} cannot be used: it raised {raised_in(error, str(home))}"
        ) from error
