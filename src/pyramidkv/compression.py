"""How much a method keeps: a budget or a ratio of the prompt, and a bound while decoding.

As `methods.py`, this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .budgets import BudgetError, budget_from_ratio, check_budget
from .cascade import Cascade
from .method_options import MethodError
from .methods import DECODE_INTERVAL, METHODS, Method, get_method
from .schedule_profile import ScheduleProfile

GROWTH_ROWS = 64
"""Rows of room a layer's storage has after the prompt, and gains each time it is full."""


@dataclass(frozen=True)
class Compression:
    """A method together with how much it keeps: a budget or a compression ratio, never both.

    Attributes:
        method: the method.
        budget: tokens per layer and KV head, averaged over layers, sinks and window included.
        compression_ratio: fraction of the prompt removed, in [0, 1).
        decode_budget: bound on the tokens kept per layer on average, generated ones included;
            without one, everything generated is kept.
        decode_interval: tokens after which the cache is brought back to the decode budget.
    """

    method: Method
    budget: int | None = None
    compression_ratio: float | None = None
    decode_budget: int | None = None
    decode_interval: int = DECODE_INTERVAL

    def __post_init__(self) -> None:
        method = self.method
        self._check_decoding()
        if self.budget is not None and type(self.budget) is not int:
            raise MethodError(f"budget is {self.budget!r}; it is a whole number of tokens")
        if not isinstance(self.compression_ratio, int | float | None):
            raise MethodError(f"compression_ratio is {self.compression_ratio!r}; it is a number")
        listed = {"list": "layer budgets", "heads": "head budgets"}.get(method.options.allocation)
        if not method.evicts or listed is not None:
            if self.budget is not None or self.compression_ratio is not None:
                why = "keeps everything" if not method.evicts else f"has a list of {listed}"
                raise MethodError(
                    f"{method.name} {why}, so it takes neither a budget nor a compression ratio"
                )
            return
        if (self.budget is None) == (self.compression_ratio is None):
            given = "neither" if self.budget is None else "both"
            raise MethodError(
                f"give {method.name} either a budget (tokens kept per layer) or a compression "
                f"ratio (fraction removed); {given} given"
            )
        if self.budget is not None:
            self._check_amount(self.budget)
        else:
            assert self.compression_ratio is not None
            try:
                budget_from_ratio(self.compression_ratio, 1)
            except ValueError as error:
                raise MethodError(str(error)) from None

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> Compression:
        """Return the compression whose `parameters()` these are.

        Raises:
            MethodError, BudgetError, ProfileError: they are those of none.
        """
        chosen = dict(parameters)
        name = chosen.pop("method", None)
        amounts = {key: chosen.pop(key, None) for key in cls(METHODS["full"]).amounts}
        defaults = get_method(str(name)).options
        for key, value in list(chosen.items()):
            value = _frozen(value)
            if key == "profile" and value is not None:
                value = ScheduleProfile.from_dict(value)
            if hasattr(defaults, key) and value == getattr(defaults, key):
                del chosen[key]
            else:
                chosen[key] = value
        return make_compression(str(name), **amounts, **chosen)

    def _check_decoding(self) -> None:
        if self.decode_budget is None:
            return
        self.method.require("decode budget")
        for name, value in (
            ("decode_budget", self.decode_budget),
            ("decode_interval", self.decode_interval),
        ):
            if type(value) is not int or value < 1:
                raise MethodError(f"{name} is {value!r}; it is a whole number of at least 1 token")
        if self.method.options.allocation == "list":
            raise MethodError(
                f"{self.method.name} has a list of layer budgets, which says nothing about how a "
                "decode budget is shared; choose another allocation"
            )
        try:
            self._check_amount(self.decode_budget)
        except BudgetError as error:
            raise BudgetError(f"decode budget: {error}") from None

    def _check_amount(self, budget: int) -> None:
        """Refuse what no prompt and no number of layers would make possible."""
        check_budget(budget, self.method.options.protected)
        if self.method.options.allocation not in ("entropy", "global"):  # which need more numbers
            self.method.schedule(1, budget, budget)

    def budget_for(self, prompt_length: int) -> int:
        """Return the budget for a prompt of this length, in tokens per layer on average."""
        if self.budget is not None:
            return self.budget
        if self.compression_ratio is not None:
            budget = budget_from_ratio(self.compression_ratio, prompt_length)
            protected = min(self.method.options.protected, prompt_length)
            if budget < protected:
                raise BudgetError(
                    f"a compression ratio of {self.compression_ratio} leaves {budget} of "
                    f"{prompt_length} prompt tokens per layer, but sinks and window take "
                    f"{protected}; give a smaller ratio, a smaller window or a budget"
                )
            return budget
        return prompt_length

    @property
    def measured(self) -> bool:
        """Whether the schedule follows from the prompt itself: see `cascade`."""
        return self.method.options.measured

    @property
    def follows_prompt(self) -> bool:
        """Whether what each layer keeps is known after the prompt only."""
        return self.method.options.follows_prompt

    def schedule(self, layers: int, prompt_length: int) -> list[int]:
        """Return the tokens each layer keeps of a prompt, lowest layer first.

        Raises:
            BudgetError: the budget does not fit this prompt or number of layers.
            MethodError: the schedule follows from the prompt itself.
        """
        return self.method.schedule(layers, self.possible_budget(prompt_length), prompt_length)

    def cascade(self, layers: int, prompt_length: int) -> Cascade:
        """Return the schedule in the making of a prompt whose layers are measured one by one."""
        options = self.method.options
        budget = self.possible_budget(prompt_length)
        return Cascade(layers, budget, prompt_length, options.protected, options.make_shares)

    def possible_budget(self, prompt_length: int) -> int:
        """Return the budget for a prompt, not below what sinks and window take."""
        budget = self.budget_for(prompt_length)
        if self.compression_ratio is not None and self.method.evicts:
            # Only a prompt shorter than sinks + window can bring the budget below them here.
            budget = max(budget, self.method.options.protected)
        return budget

    def decode_schedule(self, layers: int, tokens_seen: int) -> list[int]:
        """Return the tokens each layer keeps while decoding, after this many tokens."""
        assert self.decode_budget is not None
        return self.method.schedule(layers, self.decode_budget, tokens_seen)

    def check(self, layers: int, shape: Callable[[], Mapping[str, Any]]) -> None:
        """Refuse what cannot work with this model, before any prompt is there.

        Args:
            layers: full-attention layers, which share the budget.
            shape: gives the model's fingerprint, if it is needed: see
                `model_shape.shape_fingerprint`.

        Raises:
            BudgetError: such as a list of budgets for another number of layers.
            ProfileError: the schedule profile is of another model.
        """
        options = self.method.options
        if options.profile is not None:
            options.profile.check(shape())
        if options.layer_budgets is not None:
            self.schedule(layers, max(options.layer_budgets))
        elif options.head_budgets is not None:
            self._check_table(options.head_budgets, layers, shape()["kv_heads"])
        elif options.profile is not None:
            options.make_allocation().schedule(layers, options.protected + 1, 1, options.protected)
        elif self.budget is not None and not self.follows_prompt:
            self.schedule(layers, self.budget)
        if self.decode_budget is not None:
            self.decode_schedule(layers, self.decode_budget)

    @staticmethod
    def _check_table(table: tuple[tuple[int, ...], ...], layers: int, heads: int) -> None:
        if (len(table), len(table[0])) != (layers, heads):
            raise BudgetError(
                f"the head budgets are for {len(table)} layers of {len(table[0])} KV heads, but "
                f"the model has {layers} full-attention layers of {heads}; give one list per "
                "layer and one entry per head"
            )

    @property
    def amounts(self) -> dict[str, Any]:
        """How much is kept, as the arguments that `make_compression` takes."""
        return {
            "budget": self.budget,
            "compression_ratio": self.compression_ratio,
            "decode_budget": self.decode_budget,
            "decode_interval": None if self.decode_budget is None else self.decode_interval,
        }

    def parameters(self) -> dict[str, Any]:
        """Return everything that was chosen, as plain values for a record."""
        chosen: dict[str, Any] = {"method": self.method.name, **self.amounts}
        for name in sorted(self.method.settable):
            value = getattr(self.method.options, name)
            chosen[name] = value.as_dict() if isinstance(value, ScheduleProfile) else value
        return chosen


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def make_compression(
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    decode_budget: int | None = None,
    decode_interval: int | None = None,
    **options: Any,
) -> Compression:
    """Return a validated `Compression` from what a user typed.

    With a decode budget and neither a budget nor a ratio, the prompt gets the same budget.

    Raises:
        MethodError: unknown method or option, both or neither of budget and ratio.
        BudgetError: the budget is below sinks + window.
    """
    if isinstance(method, str):
        method = get_method(method, **options)
    elif not isinstance(method, Method):
        raise MethodError(f"method is {method!r}; give a method's name or a Method")
    elif options:
        method = method.with_options(**options)
    if decode_budget is not None and budget is None and compression_ratio is None:
        budget = decode_budget
    if decode_interval is not None and decode_budget is None:
        raise MethodError("a decode interval means nothing without a decode budget; give both")
    interval = DECODE_INTERVAL if decode_interval is None else decode_interval
    return Compression(method, budget, compression_ratio, decode_budget, interval)


def describe_total(schedule: Sequence[int], budget: int, prompt_length: int) -> str:
    """Say in words how a schedule's sum compares with the budget it was made from."""
    total = sum(schedule)
    asked = len(schedule) * min(budget, prompt_length)
    if total == asked:
        return f"{total:,} tokens, exactly {len(schedule)} x {min(budget, prompt_length):,}"
    return (
        f"{total:,} tokens, {total / asked - 1:+.1%} against the {asked:,} that a budget of "
        f"{budget:,} allows"
    )


def describe_method(parameters: Mapping[str, Any] | None) -> str:
    """Name a method and how much it keeps, from `Compression.parameters`; None: the full cache.

    An allocation that is not the method's own is named too.
    """
    if parameters is None:
        return "full"
    name = str(parameters["method"])
    allocation = parameters.get("allocation")
    if name in METHODS and allocation not in (None, METHODS[name].options.allocation):
        name += f" ({allocation})"
    return name + _amount_in_words(parameters)


def without_amount(name: str, parameters: Mapping[str, Any]) -> str:
    """Return what `describe_method` said of these parameters, without how much is kept.

    It is taken from the name, since the method's own allocation may not be known any more.
    """
    return name.removesuffix(_amount_in_words(parameters))


def _amount_in_words(parameters: Mapping[str, Any]) -> str:
    if parameters.get("budget") is not None:
        return f" {parameters['budget']}"
    if parameters.get("compression_ratio") is not None:
        return f" {parameters['compression_ratio']:.0%} off"
    return ""
