"""What the layers of one cache share: the method, each row's schedule, the pass under way.

All of it is plain numbers on the host: layers never wait for a device to learn how much they hold.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cascade import Cascade
from .compression import Compression
from .contest import Contest, mean_tokens
from .errors import CacheStateError, PromptError
from .memory import FreedMemory
from .ragged import RaggedStorage
from .scores import AccumulatingScore, Score

PENDING_QUERIES = 64
"""Queries that wait, at most, before they are added to accumulated scores while decoding."""

INTERRUPTED = (
    "the last forward pass on this compressed cache was interrupted, or its attention did not go "
    "through pyramidkv; start again from an empty cache (cache.reset())"
)


Observer = Callable[[int, Tensor, Tensor, Tensor, float, float | None], None]
"""Sees each layer's states of the prompt, in turn: the layer's index among the full-attention
layers, queries `[batch, query_heads, tokens, head_dim]`, keys and values
`[batch, kv_heads, rows, head_dim]`, and the scale and softcap of the attention logits."""


@dataclass
class ForwardPass:
    """One pass of the model over new tokens, the same for all layers.

    Attributes:
        tokens: columns in it, padding included.
        in_prompt: it carries the prompt or a piece of it.
        completes: it is the last piece of the prompt.
        evicts: every layer is brought back to its budget after its attention.
        votes: queries are turned into scores after the attention.
        new: real tokens of each row; empty until the mask was read.
        voters: queries of each row that vote if it votes, earlier ones included.
        targets: rows that each layer keeps, per batch row, if it evicts.
    """

    tokens: int
    in_prompt: bool
    completes: bool
    evicts: bool
    votes: bool
    new: list[int] = field(default_factory=list)
    voters: list[int] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)


@dataclass
class CachePlan:
    """What the layers of one cache have in common.

    Attributes:
        lengths: prompt tokens of each row, without padding and without the question that only
            votes; empty until they are known.
        schedules: prompt tokens each layer keeps, per row; per head on average.
        contest: what all heads of all layers hold that compete for one total, while they do.
        seen: real tokens of each row so far.
        kept: rows each layer held after it was last brought to its budget, per batch row.
        since: real tokens of each row that came after that.
        accumulates: whether scores are sums that later queries add to.
    """

    compression: Compression
    layer_count: int
    on_layer: Callable[[int, int], None] | None = None
    only_full: bool = True  # whether the model has no layers of another kind
    score: Score | None = None
    observe: Observer | None = None
    frequencies: Tensor | None = None  # of the rotary embedding; None: positions stay
    lengths: list[int] = field(default_factory=list)
    schedules: list[Sequence[float]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    cascades: list[Cascade] = field(default_factory=list)  # per row, if schedules are measured
    contest: Contest | None = None
    kept: list[list[int]] = field(default_factory=list)
    since: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # queries not yet in accumulated scores
    columns: int = 0  # of the prompt, padding included; 0: not known yet
    columns_seen: int = 0
    pieces_done: int = 0  # of the prompt
    announced: int = 0  # columns that were announced, the question's included
    question: int = 0  # last columns of the prompt, which vote and are not kept
    steps: int = 0  # columns since the cache was last brought to its budget
    prompt_ended: bool = False
    holes: bool = False  # whether unused rows may lie between stored ones
    layers_begun: int = 0  # of the present forward pass
    layers_done: int = 0
    current: ForwardPass | None = None
    freed: FreedMemory = field(default_factory=FreedMemory)
    accumulates: bool = field(init=False)

    def __post_init__(self) -> None:
        self.score = self.compression.method.build_score()
        self.accumulates = isinstance(self.score, AccumulatingScore)

    @property
    def follows_prompt(self) -> bool:
        """Whether each row's schedule is known after its prompt only."""
        return self.compression.follows_prompt

    @property
    def remembers(self) -> bool:
        """Whether queries of the pass under way will be asked for by a later pass."""
        assert self.current is not None
        later_pieces = self.current.in_prompt and not self.current.completes
        return self.score is not None and (later_pieces or self._evicts_while_decoding)

    @property
    def _evicts_while_decoding(self) -> bool:
        return self.compression.decode_budget is not None

    def reset(self) -> None:
        """Forget the prompt, announced or seen."""
        self.lengths, self.schedules, self.seen = [], [], []
        self.kept, self.since, self.pending, self.cascades = [], [], [], []
        self.contest = None
        self.columns = self.columns_seen = self.announced = self.question = self.steps = 0
        self.pieces_done = 0
        self.prompt_ended = self.holes = False
        self.layers_begun = self.layers_done = 0
        self.current = None

    def expect(self, mask: Tensor, question: int = 0) -> None:
        """Take the whole prompt's padding mask `[batch, tokens]` before its first piece.

        Args:
            mask: nonzero for real tokens, all of the prompt's.
            question: the last tokens of every row, which only vote: they are not kept.

        Raises:
            CacheStateError: the cache is in use.
            PromptError, BudgetError: the prompt does not fit.
        """
        if self.lengths:
            raise CacheStateError(
                "this cache has a prompt already; empty it first (cache.reset()) or use another"
            )
        if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] == 0:
            given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise PromptError(f"the mask is {given}; it must be a tensor [batch, tokens]")
        if type(question) is not int:
            raise PromptError(f"question_tokens is {question!r}; it is a whole number")
        counts = _count_left_padded(mask != 0)
        if not 0 <= question < min(counts):
            raise PromptError(
                f"the question has {question} tokens, but the shortest row of the prompt has "
                f"{min(counts)}; it must have fewer than every row"
            )
        self._set_prompt([count - question for count in counts], mask.shape[1])
        self.question, self.announced = question, mask.shape[1]

    def _set_prompt(self, lengths: list[int], columns: int) -> None:
        self.lengths, self.columns = lengths, columns
        if self.follows_prompt:
            if self.compression.measured:
                self.cascades = [self.compression.cascade(self.layer_count, n) for n in lengths]
            self.schedules = [[] for _ in lengths]
        else:
            schedule = self.compression.schedule
            known = {length: schedule(self.layer_count, length) for length in set(lengths)}
            self.schedules = [known[length] for length in lengths]
        self.kept = [[0] * self.layer_count for _ in lengths]
        self.seen, self.since, self.pending = ([0] * len(lengths) for _ in range(3))

    def restore(self, length: int, schedule: Sequence[float]) -> None:
        """Take over a prompt of one row that was processed elsewhere."""
        self._set_prompt([length], length)
        self.adopt([schedule])
        self.seen, self.columns_seen, self.prompt_ended = [length], length, True

    def adopt(self, schedules: Sequence[Sequence[float]]) -> None:
        """Note what the rows keep, which are all of the same prompt."""
        self.schedules = [list(schedule) for schedule in schedules]
        self.kept = [[int(n) for n in schedule] for schedule in schedules]

    def begin(self, layer: int, tokens: int) -> ForwardPass:
        """Note that a layer takes part in a forward pass; each does so in turn, or none.

        Raises:
            CacheStateError: a pass was interrupted, so that layers are out of step, or its tokens
                do not fit the prompt that was announced.
        """
        if layer == 0 and self.layers_begun == self.layers_done == self.layer_count:
            self.layers_begun = self.layers_done = 0
        if not self.layers_begun == self.layers_done == layer:
            raise CacheStateError(INTERRUPTED)
        if layer == 0:
            self.current = self._plan_pass(tokens)
        assert self.current is not None
        self.layers_begun += 1
        return self.current

    @property
    def complete(self) -> bool:
        """Whether the whole prompt has been processed."""
        return self.columns_seen >= self.columns > 0

    def check(self, tokens: int) -> None:
        """Raise what `begin` would raise for a pass of this many tokens."""
        if self.current is None:
            self._plan_pass(tokens)

    def _plan_pass(self, tokens: int) -> ForwardPass:
        if self.complete:
            self._go_on(tokens)
            due = self.steps + tokens >= self.compression.decode_interval
            evicts = self._evicts_while_decoding and (due or self._above_budget())
            waiting = max(self.pending) + tokens >= PENDING_QUERIES
            votes = evicts or (self._evicts_while_decoding and self.accumulates and waiting)
            return ForwardPass(tokens, False, False, evicts, votes)
        left = self.columns - self.columns_seen if self.columns else tokens
        if tokens > left:
            raise CacheStateError(
                f"{tokens} tokens were given, but only {left} of the prompt that was announced are "
                "left; tokens that follow the prompt come in a pass of their own"
            )
        if self.question and left - self.question < tokens < left:
            raise CacheStateError(
                "the question that votes must come whole in the prompt's last piece; its last "
                f"{left} tokens were to come, {self.question} of them the question, but {tokens} "
                "were given"
            )
        if tokens < left:
            self.compression.method.require("prefill chunks")
        return ForwardPass(tokens, True, tokens == left, True, True)

    def _above_budget(self) -> bool:
        """Whether a row was given more of the prompt than the decode budget allows."""
        budget = self.compression.decode_budget
        assert budget is not None
        return any(sum(kept) > self.layer_count * budget for kept in self.kept)

    def _go_on(self, tokens: int) -> None:
        """Note that tokens follow the prompt, unless they might be the rest of it."""
        if self.prompt_ended:
            return
        if self.question:
            raise CacheStateError(
                "call cache.end_prompt() after a prompt with a question, before anything follows"
            )
        if tokens > 1 and not self.announced:
            raise CacheStateError(
                "the prompt was compressed after its first forward pass, and more tokens follow "
                "before one was generated; to give a prompt in pieces (prefill_chunk_size), make a "
                "CompressedCache and announce it with cache.expect_prompt(attention_mask), or call "
                "cache.end_prompt() if these tokens are to be added to the compressed prompt"
            )
        self.end_prompt()

    def end_prompt(self) -> None:
        """Note that the prompt is complete."""
        self.prompt_ended = True
        self.freed.hand_back()

    def read(self, batch: int, valid: Callable[[], Tensor | None]) -> None:
        """Learn from a pass's mask which of its tokens are real; once for all layers.

        Args:
            batch: rows of the batch.
            valid: gives bool `[batch or 1, tokens]`, or None if all are real.
        """
        now = self.current
        assert now is not None
        if now.new:
            return
        real = valid()
        announced = bool(self.columns)
        counts = [now.tokens] * batch
        if real is not None and not bool(real.all()):
            may_be_empty = announced or not now.in_prompt
            counts = _count_left_padded(real.expand(batch, -1), may_be_empty)
        if not announced:
            self._set_prompt(counts, now.tokens)
        elif len(self.lengths) != batch:
            raise PromptError(
                f"the pass has {batch} rows, but this cache's prompt has {len(self.lengths)}"
            )
        elif now.in_prompt:
            expected = [self._announced(row, now.tokens) for row in range(batch)]
            if counts != expected:
                raise PromptError(
                    "the attention mask of this piece has other padding than the prompt that was "
                    "announced; give expect_prompt the whole prompt's mask, and each piece its mask"
                )
        elif min(counts) < now.tokens:
            if not self.only_full:
                raise CacheStateError(
                    "padding after the prompt would take up room in the model's sliding windows "
                    "or states; give rows whose new tokens are equal in number"
                )
            self.holes = True
        now.new = counts
        seen = [a + b for a, b in zip(self.seen, counts, strict=True)]
        if self.score is not None:
            base = [a + b for a, b in zip(self.pending, counts, strict=True)]
            known = base if self.accumulates else seen
            now.voters = [self.score.query_count(count) for count in known]
        if now.evicts:
            now.targets = self._targets(seen)

    def _announced(self, row: int, tokens: int) -> int:
        """Return how many of the next columns of the prompt are real in a row."""
        padding = self.columns - self.lengths[row] - self.question
        end = self.columns_seen + tokens
        return max(0, end - padding) - max(0, self.columns_seen - padding)

    def _targets(self, seen: list[int]) -> list[list[int]]:
        """Return what each row keeps in each layer, given the tokens it has seen after the pass."""
        now = self.current
        assert now is not None
        if now.in_prompt:
            dropped = self.question if now.completes else 0
            if self.follows_prompt:  # nothing is known yet
                return [[count - dropped] * self.layer_count for count in seen]
            return [
                [min(int(final), count - dropped) for final in schedule]
                for schedule, count in zip(self.schedules, seen, strict=True)
            ]
        schedule = self.compression.decode_schedule
        known = {count: schedule(self.layer_count, count) for count in set(seen)}
        held = [self.candidates(layer) for layer in range(self.layer_count)]
        return [
            [min(share, held[layer][row]) for layer, share in enumerate(known[count])]
            for row, count in enumerate(seen)
        ]

    def candidates(self, layer: int) -> list[int]:
        """Return the real rows a layer has in the pass under way, new ones included."""
        assert self.current is not None
        return [
            kept[layer] + since + new
            for kept, since, new in zip(self.kept, self.since, self.current.new, strict=True)
        ]

    def targets(self, layer: int) -> list[int]:
        """Return the rows a layer keeps after this pass, for each row of the batch."""
        assert self.current is not None
        return [row[layer] for row in self.current.targets]

    def measure(self, layer: int, effective_tokens: list[float]) -> None:
        """Take what the attention of a layer spreads over in each row; the targets follow from it.

        Args:
            layer: which one; each measures in turn.
            effective_tokens: of each row.
        """
        assert self.current is not None
        for row, effective in enumerate(effective_tokens):
            self.cascades[row].add(effective)
            self.current.targets[row][: layer + 1] = self.cascades[row].held
        if layer == self.layer_count - 1:
            self.schedules = [list(targets) for targets in self.current.targets]

    def compete(
        self, keys: Tensor, values: Tensor, scores: Sequence[Tensor], lengths: Sequence[int]
    ) -> RaggedStorage:
        """Return what a layer holds whose heads compete with those of all others.

        Args:
            keys, values, scores, lengths: see `Contest.take`.
        """
        if self.contest is None:
            options, budget = self.compression.method.options, self.compression.possible_budget
            tokens = [own.shape[2] for own in scores]
            budgets = [budget(count) for count in self.lengths]
            rows = [options] * len(tokens)
            layers, heads = self.layer_count, keys.shape[1]
            self.contest = Contest(rows, layers, heads, tokens, budgets)
        storage = self.contest.take(keys, values, scores, lengths)
        if self.contest.complete:
            self.schedules = list(self.contest.means())
            self.contest = None
        return storage

    def note(self, storage: RaggedStorage) -> None:
        """Take over how much a layer keeps that nothing but its heads' budgets says."""
        for row, total in enumerate(storage.totals):
            own = [*self.schedules[row], mean_tokens(total, storage.kv_heads)]
            self.schedules[row] = own

    def positions_before(self, row: int) -> int:
        """Return where the first token stands that came since the last eviction."""
        return self.seen[row] - self.since[row]

    def end(self, layer: int) -> None:
        """Note that a layer is done with the pass; the last one closes it."""
        now = self.current
        assert now is not None
        self.layers_done += 1
        if now.in_prompt and self.on_layer is not None:
            left = -(-(self.columns - self.columns_seen) // now.tokens)
            done = self.pieces_done * self.layer_count + layer + 1
            self.on_layer(done, (self.pieces_done + left) * self.layer_count)
        if self.layers_done == self.layer_count:
            self._close(now)

    def _close(self, now: ForwardPass) -> None:
        dropped = self.question if now.completes else 0
        self.columns_seen += now.tokens - dropped
        self.pieces_done += now.in_prompt
        if now.completes:
            self.columns -= dropped
        for row, new in enumerate(now.new):
            self.seen[row] += new - dropped
            self.since[row] += new
            self.pending[row] = 0 if now.votes else self.pending[row] + new
        if now.evicts:
            self.kept = now.targets
            self.since = [0] * len(now.new)
            self.steps, self.holes = 0, False
        else:
            self.steps += now.tokens
        self.current = None

    def remove(self, tokens: list[int]) -> None:
        """Note that each row's last tokens, all of them since the last eviction, are removed."""
        self.seen = [a - b for a, b in zip(self.seen, tokens, strict=True)]
        self.since = [a - b for a, b in zip(self.since, tokens, strict=True)]

    def copy(self) -> CachePlan:
        """Return an independent copy; progress is not reported for it."""
        result = CachePlan(self.compression, self.layer_count, only_full=self.only_full)
        for name, value in vars(self).items():
            if name not in ("on_layer", "observe", "freed"):
                setattr(result, name, copy.deepcopy(value) if type(value) is list else value)
        return result

    def take_rows(self, rows: list[int]) -> None:
        """Keep these rows of the batch, in this order, some perhaps several times."""
        if not self.lengths:
            return
        self.lengths, self.seen, self.since, self.pending = (
            [values[row] for row in rows]
            for values in (self.lengths, self.seen, self.since, self.pending)
        )
        self.schedules = [list(self.schedules[row]) for row in rows]
        self.kept = [list(self.kept[row]) for row in rows]


def _count_left_padded(valid: Tensor, may_be_empty: bool = False) -> list[int]:
    """Return the real tokens of each row of a left-padded bool mask `[batch, tokens]`."""
    counts = valid.sum(-1, keepdim=True)
    tokens = valid.shape[1]
    result: list[int] = counts.flatten().tolist()
    if min(result) == 0 and not may_be_empty:
        raise PromptError("a row of the batch is all padding; every row needs a prompt")
    padded_left = torch.arange(tokens, device=valid.device) >= tokens - counts
    if not torch.equal(padded_left, valid):
        raise PromptError(
            "the batch has padding after or between real tokens; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return result
