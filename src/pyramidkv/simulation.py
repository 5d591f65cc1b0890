"""A model of attention over depth: how far an allocation pays if attention has an assumed shape.

No language model runs here and nothing is measured: attention is drawn at random from curves that
are given. Layer l of L lies at depth `x = l / (L - 1)`, 0 for the lowest. Each token has a
relevance, drawn from a normal distribution of mean 0 and deviation 1 for every layer anew. Needles
are tokens that matter; each layer looks for some of them and finds those more relevant than other
tokens. The attention of a layer is the softmax of relevance times concentration, within sinks,
window and the rest; how much of the whole each of the three gets is given too.

A layer keeps sinks, window and the most relevant of the rest, as many as its budget allows. Which
allocation keeps most of what is looked for depends on the assumed curves. This module imports
neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import count
from math import log, log2, sqrt
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .budgets import Allocation, Entropy, Power, Pyramid, Uniform, apportion, check_budget
from .errors import PyramidKVError
from .records import versions

Profile = Literal["falling", "flat", "rising"]
"""How a quantity changes from the lowest layer to the highest."""

PROFILES: tuple[Profile, ...] = get_args(Profile)

CONTROL = "inverted"
"""The pyramid upside down, with most room in the highest layer: no method uses it."""

TRIALS = 8
MOST_LAYERS = 1000
MOST_TOKENS = 10**7
MOST_TRIALS = 10_000
CLEAR_MARGIN = 2.0
"""Standard errors by which the best allocation must be ahead of the next to be called best."""


class SimulationError(PyramidKVError, ValueError):
    """A setting that the simulation cannot take; the message says what it can."""


@dataclass(frozen=True)
class AttentionModel:
    """Everything that is assumed about attention.

    Attributes:
        layers: layers that share the budget, 1 to 1,000.
        length: prompt tokens, up to 10^7.
        needles: tokens that matter, all between sinks and window.
        needle_strength: how much more relevant a needle is to a layer that looks for it, in
            standard deviations of relevance.
        needle_depth_profile: whether the needles that a layer looks for get fewer with depth
            (`falling`), stay the same or get more; all three look for equally many in all.
        concentration_depth_profile: the same for the concentration of attention; `rising` is broad
            below and narrow above.
        c_min, c_max: concentration (inverse temperature) at the profile's ends; a flat profile
            lies half-way.
        sink_tokens, window_size: first and last tokens, kept by every layer.
        sink_mass, recent_mass: fractions of the attention of every layer that sinks and window
            hold. Where there is no sink or no window, its fraction falls to the other tokens.

    Raises:
        SimulationError: a value is out of its range, or the needles do not fit.
    """

    layers: int = 32
    length: int = 4096
    needles: int = 64
    needle_strength: float = 2.0
    needle_depth_profile: Profile = "falling"
    concentration_depth_profile: Profile = "rising"
    c_min: float = 0.5
    c_max: float = 3.0
    sink_tokens: int = 4
    window_size: int = 32
    sink_mass: float = 0.3
    recent_mass: float = 0.2

    def __post_init__(self) -> None:
        for name, lowest, highest in (
            ("layers", 1, MOST_LAYERS),
            ("length", 1, MOST_TOKENS),
            ("needles", 1, MOST_TOKENS),
            ("sink_tokens", 0, MOST_TOKENS),
            ("window_size", 0, MOST_TOKENS),
        ):
            _check_whole(name, getattr(self, name), lowest, highest)
        for name in ("needle_strength", "c_min", "c_max"):
            _check_number(name, getattr(self, name), 100)
        for name in ("sink_mass", "recent_mass"):
            _check_number(name, getattr(self, name), 1)
        for name in ("needle_depth_profile", "concentration_depth_profile"):
            value = getattr(self, name)
            if value not in PROFILES:
                raise SimulationError(f"{name} is {value!r}; choose one of {', '.join(PROFILES)}")
        if self.c_min > self.c_max:
            raise SimulationError(f"c_min is {self.c_min}, above c_max ({self.c_max}); swap them")
        if self.sink_mass + self.recent_mass >= 1:
            raise SimulationError(
                f"sink_mass {self.sink_mass} and recent_mass {self.recent_mass} leave nothing for "
                "the other tokens; their sum must be below 1"
            )
        if self.needles > self.evictable:
            raise SimulationError(
                f"{self.needles:,} needles do not fit between {self.sink_tokens:,} sinks and a "
                f"window of {self.window_size:,} in a prompt of {self.length:,} tokens; give a "
                f"length of at least {self.protected + self.needles:,}, or fewer needles"
            )

    @property
    def protected(self) -> int:
        """Tokens that every layer keeps: sinks and window."""
        return self.sink_tokens + self.window_size

    @property
    def evictable(self) -> int:
        """Tokens between sinks and window."""
        return self.length - self.protected

    @property
    def groups(self) -> tuple[tuple[slice, float], ...]:
        """Sinks, the rest and window: where each lies, and its fraction of the attention."""
        sinks = self.sink_mass if self.sink_tokens else 0.0
        recent = self.recent_mass if self.window_size else 0.0
        end = self.length - self.window_size
        return (
            (slice(0, self.sink_tokens), sinks),
            (slice(self.sink_tokens, end), 1 - sinks - recent),
            (slice(end, self.length), recent),
        )

    def most_entropy(self) -> float:
        """Return the entropy in bits if all tokens of a group got the same attention."""
        return sum(
            mass * (log2(place.stop - place.start) - log2(mass))
            for place, mass in self.groups
            if mass > 0
        )

    def concentrations(self) -> list[float]:
        """Return the concentration of each layer, lowest first."""
        span = self.c_max - self.c_min
        shares = _curve(self.concentration_depth_profile, self.layers)
        return [self.c_min + span * float(share) for share in shares]

    def needles_by_layer(self) -> list[int]:
        """Return how many needles each layer looks for, lowest first.

        The sum is half of `layers * needles`, rounded up, whatever the profile.
        """
        total = (self.layers * self.needles + 1) // 2
        falls = self.needle_depth_profile != "flat"
        shares = _curve("falling" if falls else "flat", self.layers)
        counts = apportion(shares, total, 0, self.needles)
        return counts[::-1] if self.needle_depth_profile == "rising" else counts


@dataclass(frozen=True)
class LayerAttention:
    """One layer of one repetition.

    Attributes:
        model: what it was drawn from.
        concentration: inverse temperature of its softmax.
        relevance: of each token, in standard deviations, float32 `[length]`.
        looked_for: positions of the needles it looks for.
    """

    model: AttentionModel
    concentration: float
    relevance: NDArray[np.float32]
    looked_for: NDArray[np.int64]

    def entropy(self) -> float:
        """Return the entropy of the layer's attention, in bits."""
        nats = 0.0
        for place, mass in self.model.groups:
            if mass > 0:
                nats += mass * (self._entropy_within(self.relevance[place]) - log(mass))
        return max(nats, 0.0) / log(2)  # rounding can go below

    def _entropy_within(self, relevance: NDArray[np.float32]) -> float:
        """Entropy in nats of the softmax over one group."""
        logits = self.concentration * (relevance - relevance.max())
        weights = np.exp(logits)
        total = float(weights.sum(dtype=np.float64))
        return log(total) - float(np.dot(weights, logits)) / total

    def kept(self, evictable_kept: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return what each of several numbers of kept evictable tokens keeps.

        A needle is kept if fewer tokens than there is room for are more relevant.

        Returns:
            the needles looked for that are kept, and the fraction of the attention that is,
            sinks and window included; one entry for each of `evictable_kept`.
        """
        place, mass = self.model.groups[1]
        ascending = np.sort(self.relevance[place])
        size = len(ascending)
        above = size - np.searchsorted(ascending, self.relevance[self.looked_for], "right")
        found = (above[:, None] < np.asarray(evictable_kept)).sum(axis=0)
        weights = np.exp(self.concentration * (ascending - ascending[-1]))
        whole = weights.sum(dtype=np.float64)
        shares = [weights[size - kept :].sum(dtype=np.float64) / whole for kept in evictable_kept]
        return found, 1 - mass + mass * np.asarray(shares)


def draw_layers(model: AttentionModel, seed: np.random.SeedSequence) -> Iterator[LayerAttention]:
    """Yield the layers of one repetition, lowest first; equal seeds give equal layers.

    The needles are the same for all layers, as a text is; only which are looked for differs.
    """
    generator = np.random.default_rng(seed)
    needles = model.sink_tokens + generator.choice(model.evictable, model.needles, replace=False)
    for concentration, sought in zip(model.concentrations(), model.needles_by_layer(), strict=True):
        relevance = generator.standard_normal(model.length, dtype=np.float32)
        looked_for = generator.choice(needles, sought, replace=False)
        relevance[looked_for] += np.float32(model.needle_strength)
        yield LayerAttention(model, concentration, relevance, looked_for)


def simulate(
    model: AttentionModel,
    budget: int,
    seed: int = 0,
    trials: int = TRIALS,
    beta: float = 20,
    gamma: float = 1.0,
    on_layer: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare allocations of one budget on simulated attention, and return the record.

    Every repetition draws its attention once for all allocations, so that differences between them
    are paired. It is drawn twice from the same seed, since the entropies, on which one of the
    allocations rests, are known only after the last layer.

    Args:
        model: what is assumed about attention.
        budget: tokens kept per layer on average, sinks and window included.
        seed: a whole number of at least 0.
        trials: independent repetitions; standard errors need at least 2.
        beta: steepness of the pyramid.
        gamma: exponent of the power law.
        on_layer: is told how many layers are done, and of how many.

    Returns:
        plain values; recalls and attention are fractions, entropies bits.

    Raises:
        SimulationError: a setting is out of its range.
        BudgetError: the budget is below sinks and window.
    """
    _check_whole("seed", seed, 0, 2**128 - 1)
    _check_whole("trials", trials, 1, MOST_TRIALS)
    _check_whole("budget", budget, 0, 2**63)
    check_budget(budget, model.protected)
    fixed = _fixed_allocations(beta, gamma)
    seeds = np.random.SeedSequence(seed).spawn(trials)
    steps = count(1)

    def advance() -> None:
        if on_layer is not None:
            on_layer(next(steps), 2 * trials * model.layers)

    entropies = np.zeros(model.layers)
    for child in seeds:
        for index, layer in enumerate(draw_layers(model, child)):
            entropies[index] += layer.entropy() / trials
            advance()
    effective = [float(2.0**bits) for bits in entropies]
    allocations = {**fixed, "entropy": Entropy(tuple(effective))}
    schedules = _schedules(allocations, model, budget)

    room = np.array(list(schedules.values())).T - model.protected  # [layers, allocations]
    found = np.zeros((trials, len(schedules)))
    attention = np.zeros((trials, len(schedules)))
    for trial, child in enumerate(seeds):
        for index, layer in enumerate(draw_layers(model, child)):
            needles, mass = layer.kept(room[index].tolist())
            found[trial] += needles
            attention[trial] += mass / model.layers
            advance()
    recall = dict(zip(schedules, (found / sum(model.needles_by_layer())).T, strict=True))
    kept = dict(zip(schedules, attention.T, strict=True))
    return {
        "versions": versions("numpy"),
        "model": asdict(model),
        "budget": budget,
        "seed": seed,
        "trials": trials,
        "beta": beta,
        "gamma": gamma,
        "needles_by_layer": model.needles_by_layer(),
        "concentration_by_layer": model.concentrations(),
        "entropy_bits_most": model.most_entropy(),
        "entropy_bits_by_layer": entropies.tolist(),
        "effective_tokens_by_layer": effective,
        "allocations": {
            name: {
                "schedule": schedule,
                "sum": sum(schedule),
                "control": name == CONTROL,
                **_mean("recall", recall[name]),
                **_mean("versus_uniform", recall[name] - recall["uniform"]),
                **_mean("attention_kept", kept[name]),
            }
            for name, schedule in schedules.items()
        },
        "winner": _winner(recall),
    }


def _fixed_allocations(beta: float, gamma: float) -> dict[str, Allocation]:
    try:
        return {"uniform": Uniform(), "pyramid": Pyramid(beta), "power": Power(gamma)}
    except ValueError as error:
        raise SimulationError(str(error)) from None


def _schedules(
    allocations: Mapping[str, Allocation], model: AttentionModel, budget: int
) -> dict[str, list[int]]:
    schedules = {
        name: allocation.schedule(model.layers, budget, model.length, model.protected)
        for name, allocation in allocations.items()
    }
    return {**schedules, CONTROL: schedules["pyramid"][::-1]}


def _mean(name: str, values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return mean and standard error over the repetitions; one repetition has no error."""
    error = float(values.std(ddof=1)) / sqrt(len(values)) if len(values) > 1 else None
    return {name: float(values.mean()), f"{name}_se": error}


def _winner(recall: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """Say which allocation has the best recall, and which others are no worse than by chance.

    Of equal ones the first is named, and it is level with the rest.
    """
    real = [name for name in recall if name != CONTROL]
    best, *others = sorted(real, key=lambda name: -float(recall[name].mean()))
    level = [name for name in others if not _is_ahead(recall[best] - recall[name])]
    return {
        "allocation": best,
        "clear": not level,
        "level_with": level,
        "next": others[0],
        **_mean("ahead_by", recall[best] - recall[others[0]]),
    }


def _is_ahead(differences: NDArray[np.float64]) -> bool:
    difference = _mean("by", differences)
    by, error = difference["by"], difference["by_se"]
    return by is not None and error is not None and by > 0 and by >= CLEAR_MARGIN * error


def _curve(profile: Profile, layers: int) -> list[Fraction]:
    """Return a curve over depth between 0 and 1: falling, flat at one half, or rising."""
    depth = [Fraction(index, max(layers - 1, 1)) for index in range(layers)]
    if profile == "flat":
        return [Fraction(1, 2)] * layers
    return depth if profile == "rising" else [1 - x for x in depth]


def _check_whole(name: str, value: object, lowest: int, highest: int) -> None:
    """Raise `SimulationError` unless the value is a whole number within the bounds."""
    if type(value) is not int or not lowest <= value <= highest:
        raise SimulationError(
            f"{name} is {value!r}; it must be a whole number from {lowest} to {highest:,}"
        )


def _check_number(name: str, value: object, highest: int) -> None:
    if type(value) not in (int, float) or not 0 <= value <= highest:  # type: ignore[operator]
        raise SimulationError(f"{name} is {value!r}; it must be a number from 0 to {highest}")
