"""One engine of `peers.py`, in a process and an environment of its own.

It loads the model once and measures what it is asked for, line by line: a JSON object comes in on
standard input with the arm, the prompt's length, the budget, the steps and a seed; one goes out
with seconds and bytes. It must not import pyramidkv unless it measures that, since the other
engines' environments do not have it.

    python peer_worker.py (pyramidkv|kvpress|openvino) MODEL [--threads N]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Arm = Callable[[int, int, int, int], dict[str, Any]]
"""Measures a prompt of so many tokens at a budget, so many steps after it, and a seed."""


def torch_arms(engine: str, folder: str, threads: int) -> dict[str, Arm]:
    """Return the arms of an engine on transformers; `full` is transformers' own cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def measured(cache: Any, ids: Any, prompt: Callable[[], Any], steps: int) -> dict[str, Any]:
        """Time the prompt and the tokens after it, each at its position."""
        start = time.perf_counter()
        token = prompt().logits[:, -1:].argmax(-1)
        taken = time.perf_counter() - start
        held = {"prefill_s": taken, "kv_bytes": bytes_of(cache)}
        seconds = []
        for step in range(steps):
            position = torch.tensor([[ids.shape[1] + step]])
            start = time.perf_counter()
            given = {"position_ids": position, "past_key_values": cache}
            token = model(token, **given).logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - start)
        return {**held, "step_s": seconds}

    def bytes_of(cache: Any) -> int:
        if hasattr(cache, "kv_bytes"):
            return int(cache.kv_bytes)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def prompt_of(tokens: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.vocab_size, (1, tokens), generator=generator)

    def full(tokens: int, budget: int, steps: int, seed: int) -> dict[str, Any]:
        ids, cache = prompt_of(tokens, seed), DynamicCache(config=model.config)
        with torch.inference_mode():
            return measured(cache, ids, lambda: prefill(ids, cache), steps)

    def prefill(ids: Any, cache: Any) -> Any:
        return model(ids, past_key_values=cache, logits_to_keep=1)

    def ours(method: str) -> Arm:
        import pyramidkv

        def arm(tokens: int, budget: int, steps: int, seed: int) -> dict[str, Any]:
            ids = prompt_of(tokens, seed)
            all_kept = method == "full"
            cache = pyramidkv.CompressedCache(model, method, None if all_kept else budget)
            with torch.inference_mode():
                return measured(cache, ids, lambda: prefill(ids, cache), steps)

        return arm

    def theirs(method: str) -> Arm:
        import kvpress

        def arm(tokens: int, budget: int, steps: int, seed: int) -> dict[str, Any]:
            ids, cache = prompt_of(tokens, seed), DynamicCache(config=model.config)
            ratio = 1 - budget / tokens
            press = {
                "snapkv": lambda: kvpress.SnapKVPress(compression_ratio=ratio),
                "pyramidkv": lambda: kvpress.PyramidKVPress(compression_ratio=ratio),
                "adakv": lambda: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=ratio)),
            }[method]()

            def prompt() -> Any:
                with press(model):
                    return prefill(ids, cache)

            with torch.inference_mode():
                return measured(cache, ids, prompt, steps)

        return arm

    make = {"pyramidkv": ours, "kvpress": theirs}[engine]
    arms = {"full": full, **{name: make(name) for name in ("snapkv", "pyramidkv", "adakv")}}
    return arms if engine == "kvpress" else {**arms, "full-in-steps": ours("full")}


def openvino_arms(file: str, threads: int) -> dict[str, Arm]:
    """Return OpenVINO GenAI's arms: its paged cache as it is, and with its own eviction.

    A pipeline's eviction is fixed when it is made, so there is one for each budget.
    """
    import numpy
    import openvino
    import openvino_genai as genai

    held: dict[str, Any] = {}

    def pipeline(budget: int | None) -> Any:
        name = str(budget)
        if name not in held:
            config = genai.SchedulerConfig()
            config.cache_size = 2
            config.enable_prefix_caching = False
            config.max_num_batched_tokens = 2**16
            if budget is not None:
                config.use_cache_eviction = True
                config.cache_eviction_config = genai.CacheEvictionConfig(
                    start_size=32,
                    recent_size=64,
                    max_cache_size=budget,
                    aggregation_mode=genai.AggregationMode.NORM_SUM,
                )
            options = {"INFERENCE_NUM_THREADS": threads}
            held[name] = genai.ContinuousBatchingPipeline(file, config, "CPU", options)
        return held[name]

    def arm(evicts: bool) -> Arm:
        def measure(tokens: int, budget: int, steps: int, seed: int) -> dict[str, Any]:
            pipe = pipeline(budget if evicts else None)
            ids = numpy.random.default_rng(seed).integers(1000, 100_000, (1, tokens))
            settings = genai.GenerationConfig(max_new_tokens=steps + 1, ignore_eos=True)
            settings.do_sample = False
            arrived: list[float] = []
            held: list[float] = []
            start = time.perf_counter()
            handle = pipe.add_request(0, openvino.Tensor(ids), settings)
            while pipe.has_non_finished_requests():
                pipe.step()
                if handle.can_read():
                    handle.read()
                    arrived.append(time.perf_counter())
                    used = pipe.get_metrics()
                    held.append(used.kv_cache_size_in_bytes * used.cache_usage / 100)
            return {
                "prefill_s": arrived[0] - start,
                "kv_bytes": held[-2],  # it evicts while it generates, and lets go of all at the end
                "step_s": [b - a for a, b in pairwise(arrived)],
            }

        return measure

    return {"full": arm(False), "eviction": arm(True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=("pyramidkv", "kvpress", "openvino"))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not disturb the answers
    if arguments.engine == "openvino":
        arms = openvino_arms(arguments.model, arguments.threads)
        packages = ["openvino-genai", "openvino"]
    else:
        arms = torch_arms(arguments.engine, arguments.model, arguments.threads)
        packages = [arguments.engine, "torch", "transformers"]
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({"versions": versions, "arms": list(arms)}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        measure = arms[asked["arm"]]
        found = measure(asked["tokens"], asked["budget"], asked["steps"], asked["seed"])
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
