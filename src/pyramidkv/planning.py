"""What a method saves on a model and a machine, computed from the model's configuration alone.

Nothing runs and no weights are read; this module imports neither torch nor transformers. All
figures are plain sums over layers, and say what they count: GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .compression import GROWTH_ROWS, Compression, describe_method
from .deployment import CACHE_BYTES, Deployment, PlanError
from .model_shape import LayerShape, ModelShape, shape_fingerprint
from .records import versions
from .stored_weights import StoredWeights
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
    planner = _Planner(shape, deployment, StoredWeights.of(shape, deployment, weight_bytes))
    full = len(shape.compressible)
    if compressions and not full:
        raise PlanError(
            f"{shape.name} has no layer that could be compressed: {_WHY[shape.layers[0].kind]}; "
            "leave out the method and the budget to plan its cache"
        )
    for compression in compressions:
        compression.check(full, lambda: shape_fingerprint(shape))
        if deployment.prefill_chunk is not None:
            compression.method.require("prefill chunks")
    described = [planner.describe(compression) for compression in (None, *compressions)]
    return {
        "versions": versions(),
        "model": _describe_model(shape),
        "deployment": {**asdict(deployment), "kv_dtype": planner.kv_dtype},
        "weights": {"parameters": shape.parameters, **asdict(planner.weights)},
        "kv_bytes_per_token": shape.kv_values_per_token * planner.value_bytes,
        "kv_room_per_gpu": planner.room,
        "full": described[0],
        "plans": described[1:],
        "notes": [*planner.notes(), *_too_large(described, deployment.batch)],
    }


_WHY = {
    "latent": "multi-head latent attention (MLA) stores one compressed vector per token already",
    "sliding": "sliding windows bound its layers already",
    "state": "its layers hold states of fixed size",
}


def _describe_model(shape: ModelShape) -> dict[str, Any]:
    kinds = [layer.kind for layer in shape.layers]
    return {
        "name": shape.name,
        "shape": shape_fingerprint(shape),
        "context_length": shape.context_length,
        "layer_kinds": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "full_attention_layers": list(shape.compressible),
        "sliding_window": next((la.window for la in shape.layers if la.window is not None), None),
        "experts": shape.experts,
        "experts_per_token": shape.experts_per_token,
    }


class _Planner:
    """One model on one machine."""

    def __init__(self, shape: ModelShape, deployment: Deployment, weights: StoredWeights):
        self._shape, self._for, self.weights = shape, deployment, weights
        in_16_or_32_bit = weights.dtype in ("float32", "bfloat16", "float16")
        own = weights.dtype if weights.dtype and in_16_or_32_bit else "bfloat16"
        self.kv_dtype = deployment.kv_dtype or own
        self.value_bytes = CACHE_BYTES[self.kv_dtype]
        if not self._is_allowed(deployment.tensor_parallel):
            raise PlanError(
                f"tensor_parallel is {deployment.tensor_parallel}, but {shape.name} has "
                f"{shape.query_heads} query heads and {shape.kv_heads} KV heads; give a number "
                "that divides the query heads, and divides the KV heads or is a multiple of them"
            )
        self.room = self._room()

    def _is_allowed(self, parts: int) -> bool:
        """Say whether the heads can be shared out over so many GPUs."""
        heads, kv_heads = self._shape.query_heads, self._shape.kv_heads
        return heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)

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
        room = usable - -(-self.weights.bytes // gpus)
        if room <= 0:
            heads = range(gpus + 1, self._shape.query_heads + 1)
            enough = [n for n in heads if self._is_allowed(n) and n * usable > self.weights.bytes]
            more = f"--tensor-parallel {enough[0]} or more, " if enough else ""
            raise PlanError(
                f"the weights of {self._shape.name} take {self.weights.bytes / 1e9:.1f} GB, which "
                f"do not fit into {gpus} x {usable / 1e9:.1f} GB ({self._for.utilization:.0%} of "
                f"each GPU); give {more}larger GPUs or a smaller --dtype"
            )
        return room

    def describe(self, compression: Compression | None) -> dict[str, Any]:
        """Return the figures of one compression, or of the full cache."""
        context, batch = self._for.context, self._for.batch
        layers = len(self._shape.compressible)
        uncompressed = [context] * layers
        schedule = uncompressed
        if compression is not None:
            schedule = compression.schedule(layers, context)
        kept = self._tokens(schedule, context)
        at_end = self._tokens(
            self._after_generation(schedule, compression), context + self._for.max_new_tokens
        )
        states = sum(layer.state_bytes(self.value_bytes) for layer in self._shape.layers)
        held = self._kv_bytes(at_end) + states
        peak = self._kv_bytes(kept)
        allocated = held
        if compression is not None:
            peak = self._peak_of_engine(kept)
            allocated += GROWTH_ROWS * self._width_of_shares()
        one_by_one = max(held, self._kv_bytes(self._tokens(uncompressed, context)) + states)
        result: dict[str, Any] = {
            "method": "full" if compression is None else compression.method.name,
            "compression": None if compression is None else compression.parameters(),
            "schedule": schedule,
            "schedule_total": sum(schedule),
            "allowed_total": _allowed_total(compression, layers, context),
            "kv_bytes_request": self._kv_bytes(kept),
            "kv_bytes_request_at_end": self._kv_bytes(at_end),
            "state_bytes_request": states,
            "kv_bytes_batch": batch * self._kv_bytes(kept),
            "bytes_batch_per_gpu": self._per_gpu(batch * (self._kv_bytes(kept) + states)),
            "peak_bytes_together": batch * peak,
            "peak_bytes_one_by_one": one_by_one + (batch - 1) * held - states * batch,
            "requests_together": self._fit(0, max(peak + states, allocated)),
            "requests_one_by_one": self._fit(one_by_one - held, held),
            **self._decoding(self._kv_bytes(kept) + states, batch),
        }
        fit = result["requests_one_by_one"]
        best = self._decoding(self._kv_bytes(kept) + states, fit) if fit else {}
        result["tokens_per_second_of_all_that_fit"] = best.get("tokens_per_second_at_most")
        return result

    def _tokens(self, schedule: Sequence[int], seen: int) -> list[int]:
        """Return the tokens that each layer of the model holds of a request.

        Args:
            schedule: tokens that the full-attention layers hold.
            seen: tokens of the request so far, for the layers of other kinds.
        """
        shares = iter(schedule)
        return [
            next(shares) if layer.kind == "full" else _kept_elsewhere(layer, seen)
            for layer in self._shape.layers
        ]

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

    def _kv_bytes(self, tokens: Sequence[int]) -> int:
        return sum(
            count * layer.values_per_token * self.value_bytes
            for count, layer in zip(tokens, self._shape.layers, strict=True)
        )

    def _width_of_shares(self) -> int:
        """Return the bytes of one token in all full-attention layers."""
        layers = (layer for layer in self._shape.layers if layer.kind == "full")
        return sum(layer.values_per_token * self.value_bytes for layer in layers)

    def _peak_of_engine(self, kept: Sequence[int]) -> int:
        """Return the most bytes of keys and values while layer after layer is compressed.

        While a layer is being compressed there are its uncompressed states and what it keeps, with
        room to grow, beside what the other layers keep. In pieces, its states are what it kept of
        earlier pieces and the piece.
        """
        chunk, context = self._for.prefill_chunk, self._for.context
        in_pieces = chunk is not None and chunk < context
        most = 0
        others = self._kv_bytes(kept) if in_pieces else 0
        for tokens, layer in zip(kept, self._shape.layers, strict=True):
            width = layer.values_per_token * self.value_bytes
            room = GROWTH_ROWS * width if layer.kind == "full" else 0
            whole = min(tokens + chunk, context) if chunk is not None else context
            if in_pieces:
                others -= tokens * width
            most = max(most, others + (whole + tokens) * width + room)
            others += tokens * width + room
        return most

    def _fit(self, more: int, each: int) -> int | None:
        """Return how many requests fit, if one of them takes some bytes more than each does."""
        if self.room is None:
            return None
        return max(0, (self.room - self._per_gpu(more)) // max(1, self._per_gpu(each)))

    def _decoding(self, held: int, batch: int) -> dict[str, Any]:
        """Return what a batch's first decoding step reads, and what that allows at best.

        Args:
            held: bytes of each request.
            batch: requests.
        """
        shape = self._shape
        read = float(shape.decode_parameters)
        if shape.experts is not None and shape.experts_per_token is not None:
            once = shape.experts_per_token / shape.experts
            read += shape.expert_parameters * (1 - (1 - once) ** batch - once)
        weights = read * self.weights.bytes_per_parameter
        per_gpu = weights / self._for.tensor_parallel + self._per_gpu(batch * held)
        bound = None
        if self._for.bandwidth is not None:
            bound = batch * self._for.bandwidth / per_gpu
        return {
            "decode_weight_bytes": round(weights),
            "decode_kv_bytes": self._copies * batch * held,
            "tokens_per_second_at_most": bound,
        }

    def notes(self) -> list[str]:
        """Return what a reader of the figures must know, in sentences."""
        shape, deployment = self._shape, self._for
        result = [*shape.notes, *self.weights.notes]
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
        if self.value_bytes == 1:
            result.append(
                "an 8-bit cache is for serving: with transformers, pyramidkv keeps the model's type"
            )
        if self.room is not None:
            result.append(
                "what the model computes with beside weights and cache (activations, logits) is "
                "not counted; leave room for it"
            )
        return result


def _too_large(described: Sequence[dict[str, Any]], batch: int) -> list[str]:
    """Say of which caches the batch does not fit."""
    fit = {
        describe_method(plan["compression"]): plan["requests_one_by_one"]
        for plan in described
        if plan["requests_one_by_one"] is not None
    }
    names = [name for name, requests in fit.items() if requests < batch]
    return [f"{batch:,} requests do not fit with {' and '.join(names)}"] if names else []


def _kept_elsewhere(layer: LayerShape, seen: int) -> int:
    """Return the tokens a layer that shares no budget holds."""
    return 0 if layer.kind == "state" else layer.kept_tokens(seen)


def _allowed_total(compression: Compression | None, layers: int, context: int) -> int | None:
    """Return the tokens that the budget allows in all; None if nothing or a list is kept."""
    if compression is None or not compression.method.evicts:
        return None
    if compression.method.options.allocation == "list":
        return None
    return layers * min(compression.budget_for(context), context)
