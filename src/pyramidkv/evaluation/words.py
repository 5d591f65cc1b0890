"""Word lists of generated tasks. No word is a part of another, so that none is found in another."""

from __future__ import annotations

from importlib import resources


def _words(name: str) -> tuple[str, ...]:
    return tuple(resources.files("pyramidkv").joinpath("data", name).read_text("utf-8").split())


NOUNS = _words("nouns.txt")
ADJECTIVES = _words("adjectives.txt")
