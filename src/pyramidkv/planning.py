"""What a method saves on a model and a machine, computed from the model's configuration alone.

Nothing runs and no weights are read; this module imports neither torch nor transformers. All
figures are plain sums over layers, and say what they count: GB are 10^9 bytes.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from math import ceil
from typing import Any

from .compression import Compression
from .deployment import CACHE_BYTES, WEIGHT_BYTES, Deployment, PlanError
from .model_shape import LayerShape, ModelShape, shape_fingerprint
from .records import method_title
from .support import TEXT_MODELS_WITHIN


def plan_memory(
    shape: ModelShape,
    deployment: Deployment,
    compressions: Sequence[Compression],
    weight_bytes: int | None = None,
) -> dict[str, Any]:
    """Return the record of a plan: the full cache and each compression, side by side.

    Args:
        shape: the model's.
        deployment: what to plan for.
        compressions: what to compare with the full cache; may be none.
        weight_bytes: bytes of the stored weights, if known; else they are counted.

    Raises:
        PlanError: the model has nothing to compress, or the machine does not fit the model.
        PyramidKVError: a compression does not fit the model or the prompt.
    """
    planner = _Planner(shape, deployment, weight_bytes)
    full = len(shape.compressible)
    if compressions and not full:
        raise PlanError(
            f"{shape.name} has no layer with full attention to compress: its multi-head latent "
            "attention (MLA) stores one compressed vector per token already; leave out the method "
            "and the budget to plan its full cache"
        )
    for compression in compressions:
        compression.check(full, lambda: shape_fingerprint(shape))
        if deployment.prefill_chunk is not None:
            compression.method.require("prefill chunks")
    described = [planner.describe(compression) for compression in (None, *compressions)]
    return {
        "versions": {"python": platform.python_version(), "pyramidkv": version("pyramidkv")},
        "model": _describe_model(shape),
        "deployment": {**asdict(deployment), "kv_dtype": planner.kv_dtype, "dtype": planner.dtype},
        "weights": {
            "parameters": shape.parameters,
            "bytes": planner.weight_bytes,
            "counted_from": "stored weights" if planner.weights_are_stored else "configuration",
        },
        "kv_bytes_per_token": shape.kv_values_per_token * planner.value_bytes,
        "kv_room_per_gpu": planner.room,
        "full": described[0],
        "plans": described[1:],
        "notes": [*planner.notes(), *_too_large(described, deployment.batch)],
    }


def _describe_model(shape: ModelShape) -> dict[str, Any]:
    kinds = [layer.kind for layer in shape.layers]
    return {
        "name": shape.name,
        "shape": shape_fingerprint(shape),
        "context_length": shape.context_length,
        "layer_kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "sliding_window": next((la.window for la in shape.layers if la.window is not None), None),
        "experts": shape.experts,
        "experts_per_token": shape.experts_per_token,
    }


@dataclass(frozen=True)
class _Held:
    """Tokens each layer of the model holds of one request, and bytes of states beside them."""

    tokens: list[int]
    state_bytes: int


class _Planner:
    """One model on one machine."""

    def __init__(self, shape: ModelShape, deployment: Deployment, weight_bytes: int | None):
        self._shape, self._for = shape, deployment
        self.dtype = deployment.dtype or _known_dtype(shape)
        self.kv_dtype = deployment.kv_dtype or (
            self.dtype if self.dtype in ("float32", "bfloat16", "float16") else "bfloat16"
        )
        self.value_bytes = CACHE_BYTES[self.kv_dtype]
        self.weights_are_stored = weight_bytes is not None and deployment.dtype is None
        counted = ceil(shape.parameters * WEIGHT_BYTES[self.dtype])
        self.weight_bytes = (
            weight_bytes if self.weights_are_stored and weight_bytes is not None else counted
        )
        self._check_parallel()
        self.room = self._room()

    def _check_parallel(self) -> None:
        heads, parts = self._shape.query_heads, self._for.tensor_parallel
        kv_heads = self._shape.kv_heads
        if heads % parts or (kv_heads % parts and parts % kv_heads):
            raise PlanError(
                f"tensor_parallel is {parts}, but {self._shape.name} has {heads} query heads and "
                f"{kv_heads} KV heads; give a number that divides the query heads, and divides the "
                "KV heads or is a multiple of them"
            )

    @property
    def _copies(self) -> int:
        """How often each number of the cache is stored: GPUs may outnumber the KV heads."""
        if any(layer.kind == "latent" for layer in self._shape.layers):
            return self._for.tensor_parallel
        return max(1, self._for.tensor_parallel // self._shape.kv_heads)

    def _per_gpu(self, held: int) -> int:
        return -(-held * self._copies // self._for.tensor_parallel)

    def _room(self) -> int | None:
        """Return the bytes that each GPU has for the cache; None if no memory is given."""
        gpus = self._for.tensor_parallel
        if self._for.kv_memory is not None:
            return self._for.kv_memory // gpus
        if self._for.gpu_memory is None:
            return None
        usable = int(self._for.gpu_memory * self._for.utilization)
        room = usable - -(-self.weight_bytes // gpus)
        if room <= 0:
            least = self.weight_bytes // usable + 1 if usable else 1
            raise PlanError(
                f"the weights of {self._shape.name} take {self.weight_bytes / 1e9:.1f} GB, which "
                f"do not fit into {gpus} x {usable / 1e9:.1f} GB ({self._for.utilization:.0%} of "
                f"each GPU); give --tensor-parallel {least} or more, larger GPUs, or a smaller "
                "--dtype"
            )
        return room

    def describe(self, compression: Compression | None) -> dict[str, Any]:
        """Return the figures of one compression, or of the full cache."""
        context, deployment = self._for.context, self._for
        layers = self._shape.compressible
        schedule = [context] * len(layers)
        if compression is not None:
            schedule = compression.schedule(len(layers), context)
        prompt = self._held(schedule, context)
        end = self._held(self._after_generation(schedule, compression), context, grown=True)
        kept, at_end = self.kv_bytes(prompt), self.kv_bytes(end)
        in_engine = kept if compression is None else self._peak_of_engine(prompt)
        in_serving = self.kv_bytes(self._held([context] * len(layers), context))
        budget = None if compression is None else _allowed(compression, len(layers), context)
        result: dict[str, Any] = {
            "method": "full" if compression is None else compression.method.name,
            "compression": None if compression is None else compression.parameters(),
            "schedule": schedule,
            "schedule_total": sum(schedule),
            "allowed_total": budget,
            "kv_bytes_request": kept,
            "kv_bytes_request_at_end": at_end,
            "state_bytes_request": prompt.state_bytes,
            "kv_bytes_batch": deployment.batch * kept,
            "bytes_batch_per_gpu": self._per_gpu(deployment.batch * (kept + prompt.state_bytes)),
            "peak_bytes_layer_by_layer": in_engine,
            "peak_bytes_all_layers": in_serving,
        }
        held = at_end + end.state_bytes
        result["requests_layer_by_layer"] = self._requests(held, in_engine + prompt.state_bytes)
        result["requests_all_layers"] = self._requests(held, in_serving + prompt.state_bytes)
        result |= self._decoding(held)
        return result

    def _held(self, schedule: Sequence[int], context: int, grown: bool = False) -> _Held:
        """Say what a request holds, given what the full-attention layers do."""
        seen = context + self._for.max_new_tokens if grown else context
        shares = iter(schedule)
        tokens = [
            next(shares) if layer.kind == "full" else _kept_elsewhere(layer, seen)
            for layer in self._shape.layers
        ]
        states = sum(layer.state_bytes(self.value_bytes) for layer in self._shape.layers)
        return _Held(tokens, states)

    def _after_generation(
        self, schedule: Sequence[int], compression: Compression | None
    ) -> list[int]:
        new = self._for.max_new_tokens
        grown = [kept + new for kept in schedule]
        if compression is None or compression.decode_budget is None or not new:
            return grown
        bounds = compression.decode_schedule(len(schedule), self._for.context + new)
        interval = compression.decode_interval
        return [min(n, bound + interval) for n, bound in zip(grown, bounds, strict=True)]

    def kv_bytes(self, held: _Held) -> int:
        """Return the bytes of keys and values, states not counted."""
        return sum(
            tokens * layer.values_per_token * self.value_bytes
            for tokens, layer in zip(held.tokens, self._shape.layers, strict=True)
        )

    def _peak_of_engine(self, held: _Held) -> int:
        """Return the most bytes of keys and values while layer after layer is compressed.

        While a layer is being compressed there are its uncompressed states and what it keeps,
        beside what the other layers keep. In pieces, its states are what it kept of earlier pieces
        and the piece.
        """
        chunk, context = self._for.prefill_chunk, self._for.context
        in_pieces = chunk is not None and chunk < context
        most = 0
        before = 0 if not in_pieces else self.kv_bytes(held)
        for tokens, layer in zip(held.tokens, self._shape.layers, strict=True):
            width = layer.values_per_token * self.value_bytes
            if not in_pieces:
                most = max(most, before + (context + tokens) * width)
                before += tokens * width
            else:
                assert chunk is not None
                whole = min(tokens + chunk, context)
                most = max(most, before + whole * width)
        return most

    def _requests(self, held: int, peak: int) -> int | None:
        """Return how many requests fit, if one prompt at a time is being processed."""
        if self.room is None:
            return None
        rest = self.room - self._per_gpu(peak)
        return 0 if rest < 0 else 1 + rest // max(1, self._per_gpu(held))

    def _decoding(self, held: int) -> dict[str, Any]:
        """Return what one decoding step of the whole batch reads, and what that allows at best."""
        shape, batch = self._shape, self._for.batch
        read = float(shape.decode_parameters)
        if shape.experts is not None and shape.experts_per_token is not None:
            once = shape.experts_per_token / shape.experts
            read += shape.expert_parameters * (1 - (1 - once) ** batch - once)
        weights = read * self.weight_bytes / shape.parameters
        per_gpu = weights / self._for.tensor_parallel + self._per_gpu(batch * held)
        bound = None
        if self._for.bandwidth is not None:
            bound = batch * self._for.bandwidth / per_gpu
        return {
            "decode_weight_bytes": round(weights),
            "decode_kv_bytes": batch * held,
            "tokens_per_second_at_most": bound,
        }

    def notes(self) -> list[str]:
        """Return what a reader of the figures must know, in sentences."""
        shape, deployment = self._shape, self._for
        result = list(shape.notes)
        if shape.dtype is None and deployment.dtype is None:
            result.append(
                f"the configuration names no type of the weights; {self.dtype} is assumed"
            )
        seen = deployment.context + deployment.max_new_tokens
        if seen > shape.context_length:
            result.append(
                f"{seen:,} tokens are more than this model's context of {shape.context_length:,}"
            )
        kinds = {layer.kind for layer in shape.layers}
        if "latent" in kinds:
            result.append(
                "multi-head latent attention (MLA) stores one compressed vector per token, on "
                "every GPU, and is not compressed further"
            )
        if "sliding" in kinds:
            result.append("sliding-window layers are bounded already and left as they are")
        if "state" in kinds:
            result.append(
                "layers with a state of fixed size (linear attention, convolution) are left as "
                "they are; their states are counted where requests are"
            )
        if shape.within is not None and shape.within not in TEXT_MODELS_WITHIN:
            result.append(
                f"pyramidkv compresses the text model of a {shape.within} model only if that is "
                "loaded by itself"
            )
        if self._copies > 1 and "latent" not in kinds:
            result.append(
                f"more GPUs than KV heads: each number of the cache is stored {self._copies} times"
            )
        if shape.experts is not None:
            result.append(
                "experts read in a decoding step are those that a batch reaches on average if "
                "every token chooses evenly"
            )
        return result


def _too_large(described: Sequence[dict[str, Any]], batch: int) -> list[str]:
    """Say of which caches the batch does not fit."""
    names = [
        method_title(plan["compression"])
        for plan in described
        if plan["requests_layer_by_layer"] is not None and plan["requests_layer_by_layer"] < batch
    ]
    if not names:
        return []
    return [f"a batch of {batch:,} does not fit with {' and '.join(names)}"]


def _known_dtype(shape: ModelShape) -> str:
    if shape.dtype is None:
        return "bfloat16"
    if shape.dtype not in WEIGHT_BYTES:
        raise PlanError(
            f"the configuration of {shape.name} has weights of type {shape.dtype!r}, whose size "
            f"is not known here; name one with --dtype: {', '.join(WEIGHT_BYTES)}"
        )
    return shape.dtype


def _kept_elsewhere(layer: LayerShape, seen: int) -> int:
    """Return the tokens a layer that shares no budget holds."""
    return 0 if layer.kind == "state" else layer.kept_tokens(seen)


def _allowed(compression: Compression, layers: int, context: int) -> int | None:
    """Return the tokens that the budget allows in all; None if it is a list with its own total."""
    options = compression.method.options
    if not compression.method.evicts or options.allocation == "list":
        return None
    return layers * min(compression.budget_for(context), context)
