"""The Triton kernels against one masked softmax in float32: on a GPU, or interpreted.

Triton reads TRITON_INTERPRET when it is imported, so it has to be set before pytest starts.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter multiplies bfloat16 as if its bits were whole numbers.
SMALL_DTYPE = torch.float16 if INTERPRETED else torch.bfloat16

from test_decode_attention import close

from pyramidkv import triton_attention
from pyramidkv.decode_attention import attend_reference
from pyramidkv.head_selection import HeadSelection
from pyramidkv.ragged import RaggedStorage
from pyramidkv.triton_attention import attend_ragged


def made(lengths, size, dtype=torch.float32, tail=3, group=2, new=1):
    """Return queries and a storage whose heads have these lengths."""
    torch.manual_seed(0)
    batch, heads, columns = len(lengths), len(lengths[0]), max(map(max, lengths)) or 1
    keys, values = torch.randn(2, batch, heads, columns, size).to(DEVICE, dtype)
    rows = [
        HeadSelection(
            torch.cat([torch.arange(n, device=DEVICE) for n in row])[None],
            torch.tensor([row], device=DEVICE),
        )
        for row in lengths
    ]
    storage = RaggedStorage.gather(keys, values, rows, [columns] * batch)
    storage.append(*torch.randn(2, batch, heads, tail, size).to(DEVICE, dtype))
    return torch.randn(batch, heads * group, new, size).to(DEVICE, dtype), storage


def check(queries, storage, softcap=None):
    keys, values, visible = storage.dense()
    expected = attend_reference(queries, keys, values, 0.1, softcap, visible)
    close(attend_ragged(queries, storage, 0.1, softcap), expected)


@pytest.mark.parametrize(
    "lengths",
    [
        [[1]],
        [[64, 64]],  # ends of tiles and segments together
        [[63, 1, 64, 65]],
        [[200, 1, 1, 1, 3]],
        [[0, 130, 0, 0], [0, 0, 5, 0]],
        [[7, 20], [150, 0], [1, 1]],
        [[0, 0]],
    ],
)
def test_segments_of_any_length_equal_the_reference(lengths):
    check(*made(lengths, 64))


@pytest.mark.parametrize(("size", "group"), [(16, 1), (64, 8), (80, 3), (128, 7), (256, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, SMALL_DTYPE])
def test_head_sizes_and_groups_equal_the_reference(size, group, dtype):
    check(*made([[70, 3]], size, dtype, group=group))


@pytest.mark.parametrize(("tail", "new"), [(1, 1), (64, 2), (65, 5), (150, 1), (40, 40)])
def test_tails_of_any_length_equal_the_reference(tail, new):
    check(*made([[70, 3]], 64, tail=tail, new=new))


def test_capped_logits_equal_the_reference():
    queries, storage = made([[70, 3]], 64)
    check(10 * queries, storage, softcap=2.0)


def test_holes_in_the_tail_are_not_seen():
    queries, storage = made([[70, 0], [3, 4]], 64, tail=5, new=3)
    storage.mark_padding(3, [1, 3])
    check(queries, storage)
    storage.mark_padding(5, [0, 0])
    check(queries, storage)


def test_large_tiles_equal_the_reference(monkeypatch):
    monkeypatch.setattr(triton_attention, "PROGRAMS", 2)
    check(*made([[300, 5, 0, 120]], 32, tail=200))
