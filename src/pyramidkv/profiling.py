"""What a model's attention looks like, layer by layer and head by head, on texts of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .budgets import Allocation, Pyramid, Uniform
from .cache import CompressedCache
from .entropy import EPSILON, AttentionStatistics, measure_attention
from .errors import PromptError
from .generation import process
from .measure import machine, versions
from .method_options import Options
from .methods import METHODS
from .model_shape import shape_fingerprint
from .prompts import check_text, check_tokenizer, context_length
from .schedule_profile import ScheduleProfile
from .support import check_model, full_attention_layers

BUDGETS = (64, 128, 256, 512, 1024)
"""Those of which the kept attention is told, if they are below the length."""

FUNNEL = 0.5
"""A rank correlation of entropy and depth beyond this is called a trend."""

FEWEST_LAYERS = 4
"""With fewer, chance alone makes a trend."""


@dataclass(frozen=True)
class AttentionProfile:
    """What was measured.

    Attributes:
        record: everything, as plain values ready for JSON.
        schedule: the small part of it that makes schedules.
    """

    record: dict[str, Any]
    schedule: ScheduleProfile


def profile_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Mapping[str, str],
    *,
    length: int = 2048,
    samples: int | None = None,
    all_queries: bool = False,
    window_size: int = METHODS["snapkv"].options.window_size,
    sink_tokens: int = METHODS["snapkv"].options.sink_tokens,
    budgets: Sequence[int] | None = None,
    schedule: ScheduleProfile | None = None,
    on_layer: Callable[[int, int], None] | None = None,
) -> AttentionProfile:
    """Measure the attention of every full-attention layer on pieces of some texts.

    The attention kept at a budget is that paid to the tokens that `snapkv` would keep: sinks,
    window and the best of the rest, per KV head.

    Args:
        model, tokenizer: from transformers.
        texts: by name; each gives as many samples as it has room for, taken in turns.
        length: tokens of a sample.
        samples: how many; by default one of each text.
        all_queries: measure the attention of all tokens, not of the last `window_size` only.
        window_size, sink_tokens: last and first tokens; for what they receive and what is kept.
        budgets: tokens per layer of which the kept attention is told.
        schedule: an earlier profile of this model, whose shares are compared with the others.
        on_layer: called with (layers done, layers), summed over the samples.

    Raises:
        PromptError: a text is too short, or sizes do not fit.
        UnsupportedModelError: the model has nothing to compress.
        ProfileError: the earlier profile is of another model.
        MeasurementError: the model's attention is no number.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    full = full_attention_layers(model.config)
    if schedule is not None:
        schedule.check(shape_fingerprint(model.config.to_dict()))
    protected = window_size + sink_tokens
    _check_sizes(length, samples, window_size, sink_tokens)
    limit = context_length(model.config)
    if limit is not None and length > limit:
        raise PromptError(
            f"a sample of {length:,} tokens is longer than this model's context of {limit:,}; give "
            "a smaller length"
        )
    told = [b for b in BUDGETS if protected < b < length] if budgets is None else list(budgets)
    if not all(protected <= budget <= length for budget in told):
        raise PromptError(
            f"the budgets are {', '.join(map(str, told))}; they must lie between {protected} "
            f"(sinks and window) and {length} (the sample's length)"
        )
    pieces = cut_samples(tokenizer, texts, length, samples)
    totals = [_LayerTotals() for _ in full]
    options = Options(window_size=window_size, sink_tokens=sink_tokens)
    for done, piece in enumerate(pieces):
        _measure_sample(
            model, piece.ids, options, all_queries, totals, _shift(on_layer, done, len(pieces))
        )
    allocations: dict[str, Allocation] = {
        "uniform": Uniform(),
        "pyramid": Pyramid(),
        "entropy": options.make_shares(tuple(layer.effective_tokens for layer in totals)),
    }
    if schedule is not None:
        allocations["schedule"] = options.make_shares(schedule.effective_tokens)
    measured = {
        "samples": [[piece.text, piece.start] for piece in pieces],
        "length": length,
        "queries": "all" if all_queries else "window",
        "window_size": options.window_size,
        "sink_tokens": options.sink_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(),
    }
    kept = {
        label: {str(b): _kept_by(totals, allocation, b, length, options) for b in told}
        for label, allocation in allocations.items()
    }
    return _describe(model, full, totals, measured, kept)


@dataclass(frozen=True)
class Sample:
    """A piece of a text: `length` tokens from `start` on."""

    text: str
    start: int
    ids: list[int]


def cut_samples(
    tokenizer: PreTrainedTokenizerBase, texts: Mapping[str, str], length: int, samples: int | None
) -> list[Sample]:
    """Cut texts into pieces of `length` tokens that do not overlap, and take them in turns.

    A beginning-of-text token, if the tokenizer has one, stands before each piece and counts.

    Raises:
        PromptError: there are not as many pieces as asked for.
    """
    if not texts:
        raise PromptError("no text is given; give at least one")
    start = list(tokenizer("", add_special_tokens=True)["input_ids"])
    lead = start if start == [tokenizer.bos_token_id] else []
    size = length - len(lead)
    per_text: list[list[Sample]] = []
    for name, text in texts.items():
        check_text(text, f"text {name!r}")
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if len(ids) < size:
            raise PromptError(
                f"the text {name!r} has {len(ids):,} tokens, fewer than one sample of {length:,}; "
                "give a longer text or a smaller length"
            )
        starts = range(0, len(ids) - size + 1, size)
        per_text.append([Sample(name, at, lead + ids[at : at + size]) for at in starts])
    wanted = len(texts) if samples is None else samples
    rounds = max(len(pieces) for pieces in per_text)
    turns = [pieces[i] for i in range(rounds) for pieces in per_text if i < len(pieces)]
    if len(turns) < wanted:
        raise PromptError(
            f"{wanted} samples of {length:,} tokens are asked for, but the texts have room for "
            f"{len(turns)}; give more texts or fewer or shorter samples"
        )
    return turns[:wanted]


class _LayerTotals:
    """One layer's statistics, added up over samples."""

    def __init__(self) -> None:
        self.entropy: list[Tensor] = []  # [query_heads] per sample
        self.sink_mass: list[Tensor] = []
        self.recent_mass: list[Tensor] = []
        self.kept: Tensor | None = None  # attention kept at each budget 0..N, summed over samples

    def add(self, measured: AttentionStatistics, options: Options) -> None:
        for name in ("entropy", "sink_mass", "recent_mass"):
            getattr(self, name).append(getattr(measured, name).cpu())
        kept = attention_kept(measured.received, options).cpu()
        self.kept = kept if self.kept is None else self.kept + kept

    def mean(self, name: str) -> Tensor:
        """Return the mean over samples, `[query_heads]`."""
        values: list[Tensor] = getattr(self, name)
        return torch.stack(values).mean(0)

    @property
    def effective_tokens(self) -> float:
        """The mean over samples and heads of 2^H."""
        return float(torch.stack(self.entropy).exp2().mean())

    def kept_at(self, budget: int) -> float:
        """Return the share of the attention that a budget keeps, averaged over samples."""
        assert self.kept is not None
        return float(self.kept[budget]) / len(self.entropy)


def attention_kept(received: Tensor, options: Options) -> Tensor:
    """Return which share of the attention each budget keeps, float64 `[N + 1]`.

    Args:
        received: attention each token receives, `[kv_heads, query heads of each, N]`, of sum 1.
        options: sinks, window, pooling, and how the heads of a group are combined.
    """
    combined = received.amax(1) if options.group_reduce == "max" else received.mean(1)
    best = options.order(combined.float()[None])[0]
    sorted_mass = received.gather(-1, best[:, None].expand_as(received))
    curve = sorted_mass.cumsum(-1).mean((0, 1))
    return torch.cat([curve.new_zeros(1), curve])


def _measure_sample(
    model: PreTrainedModel,
    ids: list[int],
    options: Options,
    all_queries: bool,
    totals: list[_LayerTotals],
    on_layer: Callable[[int, int], None] | None,
) -> None:
    def observe(
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        voting = queries[0] if all_queries else queries[0, :, -options.window_size :]
        sizes = {"sinks": options.sink_tokens, "recent": options.window_size}
        totals[layer].add(measure_attention(voting, keys[0], scale, softcap, **sizes), options)

    cache = CompressedCache.for_observing(model, observe, on_layer)
    tokens = torch.tensor([ids], device=model.device)
    process(model, cache, tokens, torch.ones_like(tokens), [len(ids)])


def _describe(
    model: PreTrainedModel,
    full: Sequence[int],
    totals: Sequence[_LayerTotals],
    measured: dict[str, Any],
    kept: dict[str, dict[str, float]],
) -> AttentionProfile:
    name = model.config._name_or_path
    entropy = [float(layer.mean("entropy").mean()) for layer in totals]
    effective = [layer.effective_tokens for layer in totals]
    shape = shape_fingerprint(model.config.to_dict())
    in_file = {**measured, "versions": [f"{k} {v}" for k, v in measured["versions"].items()]}
    schedule = ScheduleProfile.of(name, shape, effective, entropy, in_file)
    record = {
        **measured,
        "machine": machine(model.device),
        "model": {"name": name, "shape": shape, "layers": list(full)},
        "epsilon": EPSILON,
        "layers": [
            {
                "layer": index,
                "entropy_bits": entropy[i],
                "entropy_by_head": layer.mean("entropy").tolist(),
                "entropy_quartiles": _quartiles(layer),
                "effective_tokens": effective[i],
                "sink_mass": float(layer.mean("sink_mass").mean()),
                "recent_mass": float(layer.mean("recent_mass").mean()),
                "attention_kept": {
                    budget: layer.kept_at(int(budget)) for budget in kept["uniform"]
                },
            }
            for i, (index, layer) in enumerate(zip(full, totals, strict=True))
        ],
        "attention_kept": kept,
        "trend": describe_trend(entropy, effective),
        "schedule_profile": schedule.as_dict(),
    }
    return AttentionProfile(record, schedule)


def _quartiles(layer: _LayerTotals) -> list[float]:
    """Return the quartiles of the entropy over heads and samples: least, 25%, 50%, 75%, most."""
    values = torch.stack(layer.entropy).flatten()
    steps = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=values.dtype)
    result: list[float] = values.quantile(steps).tolist()
    return result


def _kept_by(
    totals: Sequence[_LayerTotals],
    allocation: Allocation,
    budget: int,
    length: int,
    options: Options,
) -> float:
    schedule = allocation.schedule(len(totals), budget, length, options.protected)
    shares = [layer.kept_at(kept) for layer, kept in zip(totals, schedule, strict=True)]
    return sum(shares) / len(shares)


def describe_trend(entropy: Sequence[float], effective: Sequence[float]) -> dict[str, Any]:
    """Say whether attention narrows with depth.

    Args:
        entropy, effective: bits and effective tokens per layer, lowest first.

    Returns:
        `verdict` ("funnel": entropy falls with depth, "widens", "no trend", or "too few layers"
        to tell), `correlation`
        (Spearman's of entropy and depth), and the mean effective tokens of the `lower`, `middle`
        and `upper` third.
    """
    correlation = _rank_correlation(entropy)
    verdict = "no trend" if len(entropy) >= FEWEST_LAYERS else "too few layers"
    if abs(correlation) > FUNNEL and len(entropy) >= FEWEST_LAYERS:
        verdict = "funnel" if correlation < 0 else "widens"
    third = -(-len(effective) // 3)
    parts = {
        "lower": effective[:third],
        "middle": effective[third:-third] or effective,
        "upper": effective[-third:],
    }
    return {
        "verdict": verdict,
        "correlation": correlation,
        **{name: sum(part) / len(part) for name, part in parts.items()},
    }


def _rank_correlation(values: Sequence[float]) -> float:
    """Return Spearman's correlation of values with their index; 0 if all are equal."""
    count = len(values)
    ranks = [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]
    middle = (count - 1) / 2
    covariance = sum((i - middle) * (rank - middle) for i, rank in enumerate(ranks))
    depth = sum((i - middle) ** 2 for i in range(count))
    spread = sum((rank - middle) ** 2 for rank in ranks)
    return covariance / (depth * spread) ** 0.5 if depth * spread else 0.0


def _shift(
    on_layer: Callable[[int, int], None] | None, done: int, samples: int
) -> Callable[[int, int], None] | None:
    """Report progress of one sample of several."""
    if on_layer is None:
        return None
    report = on_layer
    return lambda layer, layers: report(done * layers + layer, samples * layers)


def _check_sizes(length: int, samples: int | None, window_size: int, sink_tokens: int) -> None:
    for name, value, least in (
        ("length", length, 2),
        ("samples", samples, 1),
        ("window_size", window_size, 1),
        ("sink_tokens", sink_tokens, 0),
    ):
        if value is not None and (type(value) is not int or value < least):
            raise PromptError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    if length <= window_size + sink_tokens:
        raise PromptError(
            f"a sample of {length} tokens has none beside {sink_tokens} sinks and a window of "
            f"{window_size}; give a larger length"
        )
