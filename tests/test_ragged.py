"""Ragged storage: the same tokens as choosing by hand, no byte of padding, a tail that grows."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyramidkv.compression import GROWTH_ROWS
from pyramidkv.head_selection import HeadSelection
from pyramidkv.ragged import RaggedStorage

KEY_SIZE, VALUE_SIZE = 3, 2


class Model:
    """What a storage should hold: for each row and head its tokens, as tuples of numbers.

    A token is its key followed by its value; `None` stands for padding in the tail.
    """

    def __init__(self, storage: RaggedStorage, prompt, positions):
        self.storage, self.prompt, self.positions = storage, prompt, positions
        self.tail = [[[] for _ in row] for row in prompt]

    def check(self) -> None:
        storage = self.storage
        totals = [sum(len(head) for head in row) for row in self.prompt]
        assert list(storage.totals) == totals
        assert storage.batch == len(self.prompt)
        assert storage.kv_heads == len(self.prompt[0])
        assert storage.offsets.dtype == storage.positions.dtype == torch.int32
        assert storage.keys.shape == (sum(totals), KEY_SIZE)
        assert storage.values.shape == (sum(totals), VALUE_SIZE)
        flat = torch.cat([storage.keys, storage.values], dim=1).tolist()
        bounds = storage.bounds()
        assert bounds == storage.offsets.tolist()
        heads = [head for row in self.prompt for head in row]
        places = [head for row in self.positions for head in row]
        for start, end, head, stood in zip(bounds, bounds[1:], heads, places, strict=False):
            assert [tuple(token) for token in flat[start:end]] == head
            assert storage.positions[start:end].tolist() == stood
        self.check_dense()

    def check_dense(self) -> None:
        keys, values, real = self.storage.dense()
        dense = torch.cat([keys, values], dim=-1)
        counts = self.storage.counts()
        for r, row in enumerate(self.prompt):
            for h, head in enumerate(row):
                expected = head + [token for token in self.tail[r][h] if token is not None]
                held = dense[r, h][real[r, h]].tolist()
                assert [tuple(token) for token in held] == expected
                assert counts[r, h] == len(expected)
                assert self.storage.prompt_counts()[r, h] == len(head)
                front = dense.shape[2] - len(head) - len(self.tail[r][h])
                assert not dense[r, h, :front].any()

    def append(self, count: int, real: list[int] | None) -> None:
        shape = (len(self.prompt), len(self.prompt[0]), count)
        keys, values = states(*shape)
        self.storage.append(keys, values)
        new = torch.cat([keys, values], dim=-1).tolist()
        real = real or [count] * shape[0]
        if min(real) < count:
            self.storage.mark_padding(count, real)
        for r, row in enumerate(self.tail):
            for h, head in enumerate(row):
                tokens = [tuple(token) for token in new[r][h]]
                head += [None] * (count - real[r]) + tokens[count - real[r] :]

    def remove(self, count: int) -> None:
        self.storage.remove(count)
        self.tail = [[head[: len(head) - count] for head in row] for row in self.tail]

    def take_rows(self, order: list[int]) -> None:
        index = torch.tensor(order)
        self.storage.take_rows(functools.partial(torch.index_select, dim=0, index=index))
        self.prompt, self.positions, self.tail = (
            [[list(head) for head in held[row]] for row in order]
            for held in (self.prompt, self.positions, self.tail)
        )

    def keep(self, draw) -> None:
        marks, totals = [], []
        for prompt, positions in zip(self.prompt, self.positions, strict=True):
            totals.append(0)
            for h, head in enumerate(prompt):
                stays = draw(st.lists(st.booleans(), min_size=len(head), max_size=len(head)))
                marks += stays
                totals[-1] += sum(stays)
                prompt[h] = [t for t, stay in zip(head, stays, strict=True) if stay]
                positions[h] = [p for p, stay in zip(positions[h], stays, strict=True) if stay]
        self.storage.keep(torch.tensor(marks, dtype=torch.bool), totals)


def states(batch: int, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(batch, heads, tokens, KEY_SIZE), torch.rand(batch, heads, tokens, VALUE_SIZE)


def selection_of(kept: list[list[list[int]]]) -> HeadSelection:
    """Return the selection of rows with equal totals, from the positions each head keeps."""
    indices = [[p for head in row for p in head] for row in kept]
    return HeadSelection(
        torch.tensor(indices, dtype=torch.int64),
        torch.tensor([[len(head) for head in row] for row in kept]),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    batch, heads, columns = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
    )
    lengths = draw(st.lists(st.integers(1, columns), min_size=batch, max_size=batch))
    keys, values = states(batch, heads, columns)
    if draw(st.booleans()):  # laid out as a model's projections leave them
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    kept = [
        [sorted(draw(st.sets(st.integers(0, length - 1)))) for _ in range(heads)]
        for length in lengths
    ]
    stood = None
    if draw(st.booleans()):
        stood = torch.arange(batch * heads * columns, dtype=torch.int32).view(batch, heads, columns)
    storage = RaggedStorage.gather(
        keys, values, [selection_of([row]) for row in kept], lengths, stood, draw(st.integers(0, 2))
    )
    dense = torch.cat([keys, values], dim=-1)
    first = [columns - length for length in lengths]
    prompt = [
        [[tuple(dense[r, h, first[r] + p].tolist()) for p in head] for h, head in enumerate(row)]
        for r, row in enumerate(kept)
    ]
    if stood is not None:
        kept = [
            [stood[r, h, [first[r] + p for p in head]].tolist() for h, head in enumerate(row)]
            for r, row in enumerate(kept)
        ]
    return Model(storage, prompt, kept)


@settings(deadline=None)
@given(models(), st.data())
def test_whatever_is_done_to_it_it_holds_what_lists_would_hold(model, data):
    model.check()
    for _ in range(data.draw(st.integers(1, 6))):
        batch, rows = len(model.prompt), model.storage.tail.rows
        match data.draw(st.sampled_from(["append", "padding", "remove", "rows", "keep", "copy"])):
            case "append":
                model.append(data.draw(st.integers(1, 3)), None)
            case "padding":
                count = data.draw(st.integers(1, 3))
                real = st.lists(st.integers(0, count), min_size=batch, max_size=batch)
                model.append(count, data.draw(real))
            case "remove":
                model.remove(data.draw(st.integers(0, rows)))
            case "rows":
                order = st.lists(st.integers(0, batch - 1), min_size=1, max_size=4)
                model.take_rows(data.draw(order))
            case "keep":
                model.keep(data.draw)
            case "copy":
                model.storage = model.storage.copy()
        model.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_prompts_part_has_no_byte_of_padding(dtype):
    keys = torch.rand(2, 2, 100, 64, dtype=dtype)
    kept = [[list(range(90)), [0]], [[3, 99], list(range(50, 60))]]
    storage = RaggedStorage.gather(keys, keys, [selection_of([row]) for row in kept], [100, 100])
    tokens, size = 90 + 1 + 2 + 10, 64 * keys.element_size()
    tail = 2 * 2 * 2 * GROWTH_ROWS * size
    assert storage.keys.nbytes + storage.values.nbytes == 2 * tokens * size
    assert storage.nbytes == 2 * tokens * size + 4 * tokens + 4 * 5 + tail
    for tensor in (storage.keys, storage.values, storage.positions):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_growing_does_not_move_the_prompts_part():
    keys, values = states(1, 2, 10)
    storage = RaggedStorage.gather(keys, values, [selection_of([[[1, 2, 3], [4]]])], [10])
    before = storage.keys.data_ptr(), storage.values.data_ptr()
    capacities = set()
    for _ in range(2 * GROWTH_ROWS + 1):
        storage.append(*states(1, 2, 1))
        tail_bytes = storage.tail.nbytes
        capacities.add(tail_bytes // (2 * 4 * (KEY_SIZE + VALUE_SIZE)))
    assert (storage.keys.data_ptr(), storage.values.data_ptr()) == before
    assert capacities == {GROWTH_ROWS, 2 * GROWTH_ROWS + 1}
    assert storage.counts().tolist() == [[3 + 2 * GROWTH_ROWS + 1, 1 + 2 * GROWTH_ROWS + 1]]


def test_a_copy_shares_the_prompts_part_and_nothing_that_changes():
    keys, values = states(2, 2, 10)
    rows = [selection_of([[[1, 2], [4]]]), selection_of([[[5], [6, 7, 8]]])]
    storage = RaggedStorage.gather(keys, values, rows, [10, 10])
    storage.append(*states(2, 2, 2))
    copy = storage.copy()
    assert copy.keys.data_ptr() == storage.keys.data_ptr()
    expected = [tensor.clone() for tensor in storage.dense()]
    copy.append(*states(2, 2, 3))
    copy.keep(torch.zeros(7, dtype=torch.bool), [0, 0])
    copy.take_rows(lambda tensor: tensor[:1])
    assert all(map(torch.equal, storage.dense(), expected))
    assert copy.counts().tolist() == [[5, 5]]


def test_what_is_chosen_of_the_dense_form_can_be_stored_again():
    keys, values = states(1, 2, 10)
    storage = RaggedStorage.gather(keys, values, [selection_of([[[1, 5, 8], [4]]])], [10])
    stood = storage.padded(storage.positions)
    assert stood.tolist() == [[[1, 5, 8], [0, 0, 4]]]
    dense_keys, dense_values, _ = storage.dense()
    rows = selection_of([[[1, 2], [2]]])
    again = RaggedStorage.gather(dense_keys, dense_values, [rows], [3], stood)
    assert again.positions.tolist() == [5, 8, 4]
    assert torch.equal(again.keys, torch.stack([keys[0, 0, 5], keys[0, 0, 8], keys[0, 1, 4]]))


def test_what_was_made_in_inference_mode_can_be_written_to_later():
    with torch.inference_mode():
        keys, values = states(1, 2, 10)
        storage = RaggedStorage.gather(keys, values, [selection_of([[[1], [2, 4]]])], [10])
        tiles = storage.tiles()
    storage.append(*states(1, 2, 1))
    assert not storage.keys.is_inference()
    assert not tiles.owners.is_inference()
    assert storage.counts().tolist() == [[2, 3]]


def test_no_device_is_waited_for():
    """On the meta device there are no numbers: whatever needed one on the host would fail."""
    keys = torch.empty(2, 3, 10, 4, device="meta")
    chosen = HeadSelection(
        torch.empty(2, 12, dtype=torch.int64, device="meta"),
        torch.empty(2, 3, dtype=torch.int64, device="meta"),
    )
    storage = RaggedStorage.gather(keys, keys, [chosen], [10, 8])
    storage.append(keys, keys)
    storage.keep(torch.empty(24, dtype=torch.bool, device="meta"), [5, 5])
    storage.take_rows(lambda tensor: tensor[:1])
    assert storage.keys.shape == (5, 4)
    assert storage.counts().shape == (1, 3)
    assert storage.copy().nbytes > 0


def test_tokens_of_the_prompt_are_not_removed():
    keys, values = states(1, 2, 10)
    storage = RaggedStorage.gather(keys, values, [selection_of([[[1], [2, 4]]])], [10])
    storage.append(*states(1, 2, 2))
    with pytest.raises(ValueError, match="last 3 rows: only the 2 that follow the prompt"):
        storage.remove(3)
