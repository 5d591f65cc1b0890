"""Schedule profiles: what was measured about a model's attention, as small files for schedules.

A profile says how many tokens each full-attention layer's attention spreads over. The allocation
`entropy` shares the budget in that proportion. This module imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .budgets import Entropy
from .errors import PyramidKVError
from .records import read_json_object, write_json

FORMAT = "pyramidkv-schedule"
VERSION = 1
MAX_BYTES = 16 * 2**20
"""No profile comes near this: it holds a few numbers per layer."""

_ABOUT = {
    "model_type": "architecture",
    "layers": "number of layers",
    "hidden_size": "hidden size",
    "query_heads": "number of query heads",
    "kv_heads": "number of KV heads",
    "head_dim": "head dimension",
    "vocab_size": "vocabulary size",
}
"""What tells models apart here, in words: see `model_shape.shape_fingerprint`."""


class ProfileError(PyramidKVError, ValueError):
    """A schedule profile that cannot be used; the message says why."""


@dataclass(frozen=True)
class ScheduleProfile:
    """What was measured of one model.

    Attributes:
        model: the model's name.
        shape: the model's fingerprint, from its configuration: see `model_shape`.
        effective_tokens: 2 to the attention entropy in bits, the mean over heads and samples, per
            full-attention layer, lowest first.
        entropy: the attention entropy itself, bits.
        measured: how: samples, their length, which queries, versions.
    """

    model: str
    shape: tuple[tuple[str, Any], ...]
    effective_tokens: tuple[float, ...]
    entropy: tuple[float, ...]
    measured: tuple[tuple[str, Any], ...] = field(default=())

    @classmethod
    def of(
        cls,
        model: str,
        shape: Mapping[str, Any],
        effective_tokens: list[float],
        entropy: list[float],
        measured: Mapping[str, Any],
    ) -> ScheduleProfile:
        """Return a profile of these values."""
        return cls(
            model,
            tuple(sorted(shape.items())),
            tuple(effective_tokens),
            tuple(entropy),
            tuple((name, _frozen(value)) for name, value in sorted(measured.items())),
        )

    @classmethod
    def read(cls, path: str | Path) -> ScheduleProfile:
        """Read a profile that `write` wrote.

        Raises:
            ProfileError: the file cannot be read, is none, or is damaged.
        """
        name = repr(str(path))
        try:
            return cls.from_dict(read_json_object(Path(path), MAX_BYTES))
        except OSError as error:
            raise ProfileError(f"cannot read {name}: {error.strerror or error}") from None
        except ProfileError as error:
            raise ProfileError(f"{name} is no schedule profile: {error}") from None
        except ValueError as error:
            raise ProfileError(
                f"{name} {error}; give a file that pyramidkv profile wrote with --save-schedule"
            ) from None

    @classmethod
    def from_dict(cls, stored: Any) -> ScheduleProfile:
        """Return the profile whose `as_dict` this is.

        Raises:
            ProfileError: it is none.
        """
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise ProfileError("give a file that pyramidkv profile wrote with --save-schedule")
        if stored.get("version") != VERSION:
            raise ProfileError(
                f"it has version {stored.get('version')!r}, but this pyramidkv reads {VERSION}"
            )
        model, measured = stored.get("model"), stored.get("measured")
        name = model.get("name") if isinstance(model, dict) else None
        shape = model.get("shape") if isinstance(model, dict) else None
        if not isinstance(name, str) or not isinstance(measured, dict):
            raise ProfileError("it does not say what was measured")
        if not all(_is_plain(value) for value in measured.values()):
            raise ProfileError("what it says about how it was measured is no list of plain values")
        if not isinstance(shape, dict) or not all(
            isinstance(value, int | str | None) for value in shape.values()
        ):
            raise ProfileError("it does not say of which model it is")
        effective = _numbers(stored, "effective_tokens")
        entropy = _numbers(stored, "entropy_bits")
        if len(entropy) != len(effective) or min(effective) <= 0 or min(entropy) < 0:
            raise ProfileError("its entropies and effective tokens do not belong together")
        return cls.of(name, shape, effective, entropy, measured)

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain values, with the shares it amounts to."""
        shares = Entropy(self.effective_tokens).weights()
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": {"name": self.model, "shape": dict(self.shape)},
            "measured": {name: _thawed(value) for name, value in self.measured},
            "entropy_bits": list(self.entropy),
            "effective_tokens": list(self.effective_tokens),
            "suggested_shares": [round(float(share), 4) for share in shares],
        }

    def write(self, path: Path) -> None:
        """Write the profile, whole or not at all.

        Raises:
            ProfileError: it cannot be written.
        """
        try:
            write_json(path, self.as_dict())
        except OSError as error:
            raise ProfileError(f"cannot write {str(path)!r}: {error.strerror or error}") from None

    def check(self, shape: Mapping[str, Any]) -> None:
        """Refuse a model of another shape; fine-tuned ones of the same shape may use the profile.

        Raises:
            ProfileError: it says what differs.
        """
        own = dict(self.shape)
        for key, words in _ABOUT.items():
            if own.get(key) != shape.get(key):
                raise ProfileError(
                    f"the schedule profile was measured on another model, {self.model}: its "
                    f"{words} is {own.get(key)}, but this model's is {shape.get(key)}; measure "
                    "this one with pyramidkv profile"
                )


def _numbers(stored: dict[str, Any], name: str) -> list[float]:
    values = stored.get(name)
    if not isinstance(values, list) or not values:
        raise ProfileError(f"it has no list {name!r}")
    for value in values:
        # an integer may be larger than any float
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
            raise ProfileError(f"its {name!r} has the entry {shown}, which is no finite number")
    return [float(value) for value in values]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(part) for part in value)
    return isinstance(value, int | float | str | None)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def _thawed(value: Any) -> Any:
    return [_thawed(part) for part in value] if isinstance(value, tuple) else value
