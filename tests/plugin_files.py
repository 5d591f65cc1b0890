"""Files of methods as users write them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs" / "methods.md"

SNAPKV = '''
"""SnapKV's score, written anew: no code of it is shared with the package."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyramidkv import Method, Options, register_method


@dataclass(frozen=True)
class Votes:
    window: int

    def query_count(self, prompt_length: int) -> int:
        return min(self.window, prompt_length)

    def __call__(self, queries, keys, values, valid, scale, softcap=None):
        assert valid is None and softcap is None
        result = torch.empty(keys.shape[:3])
        group = queries.shape[1] // keys.shape[1]
        first = keys.shape[2] - queries.shape[2]
        for row in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                by_query_head = []
                for one in range(group * head, group * (head + 1)):
                    votes = torch.zeros(keys.shape[2])
                    for i, query in enumerate(queries[row, one]):
                        seen = first + i + 1
                        logits = keys[row, head, :seen] @ query * scale
                        votes[:seen] += logits.softmax(0) / queries.shape[2]
                    by_query_head.append(votes)
                result[row, head] = torch.stack(by_query_head).amax(0)
        return result


def make(options: Options) -> Votes:
    return Votes(options.window_size)


register_method(Method("mine", "as snapkv", "this file", make))
'''

BROKEN = """
import torch

from pyramidkv import Method, register_method


class Broken:
    def query_count(self, prompt_length):
        return {count}

    def __call__(self, queries, keys, values, valid, scale, softcap=None):
        scores = keys.float().norm(dim=-1)
        return {result}


register_method(Method("broken", "fails", "this file", lambda options: {make}))
"""


def write(path: Path, text: str = SNAPKV) -> Path:
    path.write_text(text)
    return path


def broken(path: Path, result: str = "scores", count: str = "0", make: str = "Broken()") -> Path:
    return write(path, BROKEN.format(result=result, count=count, make=make))


def example() -> str:
    """The example of the documentation: the first Python block of its section."""
    section = DOCS.read_text().split("\n## Your own method\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]
