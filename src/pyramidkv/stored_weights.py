"""How many bytes a model's weights take, as stored or as asked for."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .deployment import WEIGHT_BYTES, Deployment, PlanError
from .model_shape import ModelShape

LEAST, MOST = 0.1, 8.0
"""Bytes per parameter that no stored weights are believed to fall below or go beyond."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a model.

    Attributes:
        bytes: all of them.
        dtype: their type, one of `WEIGHT_BYTES`; None if they are quantised.
        counted_from: `stored weights`, or `configuration`.
        bytes_per_parameter: of those that a decoding step reads.
        notes: what a reader must know, in sentences.
    """

    bytes: int
    dtype: str | None
    counted_from: str
    bytes_per_parameter: float
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, shape: ModelShape, deployment: Deployment, stored: int | None) -> StoredWeights:
        """Return the weights in the type asked for, else as they are stored, else as configured.

        Args:
            stored: bytes of the stored weights, if known.

        Raises:
            PlanError: the stored bytes cannot be those of this model, or the type is not known.
        """
        if deployment.dtype is not None:
            return cls._counted(shape, deployment.dtype)
        quantized = shape.quantization
        if stored is None:
            return cls._counted(shape, None) if quantized is None else cls._packed(shape, quantized)
        each = stored / shape.parameters
        if not LEAST <= each <= MOST:
            raise PlanError(
                f"the stored weights of {shape.name} are said to be {stored:,} bytes, {each:.2g} "
                f"for each of its {shape.parameters:,} parameters, which no weights are; download "
                "the model's index again, or give --dtype"
            )
        if quantized is not None:
            return cls(stored, None, "stored weights", each)
        dtype = _known_dtype(shape)
        if shape.within is not None:  # its other parts are stored, too, but not read
            each = WEIGHT_BYTES[dtype]
        return cls(stored, dtype, "stored weights", each)

    @classmethod
    def _packed(cls, shape: ModelShape, quantized: tuple[str, int | None]) -> StoredWeights:
        method, bits = quantized
        if bits is None:
            raise PlanError(
                f"the weights of {shape.name} are quantised ({method}), so that their size does "
                "not follow from the configuration; give the folder with the weights, or --dtype: "
                f"{', '.join(WEIGHT_BYTES)}"
            )
        note = (
            f"weights are quantised ({method}): {bits} bits each are counted; scales, and "
            "embeddings that are stored in a wider type, come on top"
        )
        size = ceil(shape.parameters * bits / 8)
        return cls(size, None, "configuration", bits / 8, (note,))

    @classmethod
    def _counted(cls, shape: ModelShape, asked: str | None) -> StoredWeights:
        dtype = asked or _known_dtype(shape)
        each = WEIGHT_BYTES[dtype]
        notes: tuple[str, ...] = ()
        if asked is None and shape.dtype is None:
            notes = (f"the configuration names no type of the weights; {dtype} is assumed",)
        return cls(ceil(shape.parameters * each), dtype, "configuration", each, notes)


def _known_dtype(shape: ModelShape) -> str:
    if shape.dtype is None:
        return "bfloat16"
    if shape.dtype not in WEIGHT_BYTES:
        raise PlanError(
            f"the configuration of {shape.name} has weights of type {shape.dtype!r}, whose size "
            f"is not known here; name one with --dtype: {', '.join(WEIGHT_BYTES)}"
        )
    return shape.dtype
