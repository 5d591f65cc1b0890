"""What does the plugin change about a step and about a prompt? Against stock vLLM, one by one.

Two real servers, which take turns, with room for all requests.

Decoding: a batch of prompts of one length; the time between two tokens while all of them generate
and no prompt is processed, as the median over all tokens and as the mean, which differ if the
client does not keep up. Prompts: the time until the one token that is asked for, and how much of it
the plugin's server spends compressing, by its own clock, since the difference between the two
servers is smaller than the noise.

    python benchmarks/serving_steps.py [--model M] [--budget 256] [--groups 5] [--batch 8]
        [--tokens 2000] [--steps 64] [--lengths 2000,4000,8000] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import common
import servers
import serving_arms
from servers import Server

ARMS = ("stock", "plugin")
SPENT = "pyramidkv:compaction_seconds_total"


async def arrivals(client: Any, server: Server, prompt: list[int], new: int) -> list[float]:
    """Ask for an answer and return when its tokens arrived.

    Raises:
        RuntimeError: the server sent tokens together, so that their times are not known.
    """
    times = []
    async for part in servers.stream(
        client, server, prompt=prompt, max_tokens=new, temperature=0, ignore_eos=True
    ):
        if part["choices"]:
            times.append(time.perf_counter())
    if len(times) < 0.9 * new:
        raise RuntimeError(f"{new} tokens arrived in {len(times)} parts; the machine is too busy")
    return times


async def decode(server: Server, prompts: list[list[int]], new: int) -> dict[str, float]:
    """Return median and mean time between two tokens while all answers are generated, in seconds.

    Raises:
        RuntimeError: that were fewer than ten steps.
    """
    async with servers.session(3600) as client:
        times = await asyncio.gather(*(arrivals(client, server, p, new) for p in prompts))
    start, end = max(t[0] for t in times), min(t[-1] for t in times)
    # Later than `start`, since the step in which the last prompt ends delays every answer.
    steps = [b - a for own in times for a, b in pairwise(own) if a > start and b <= end]
    if len(steps) < 10 * len(prompts):
        raise RuntimeError("the first answer ends as soon as the last one begins; raise --steps")
    return {"median": common.median(steps), "mean": statistics.mean(steps)}


async def prompt_seconds(server: Server, prompt: list[int]) -> float:
    """Return how long a prompt takes, its first token included."""
    async with servers.session(3600) as client:
        start = time.perf_counter()
        await servers.post(client, server, prompt=prompt, max_tokens=1, temperature=0)
        return time.perf_counter() - start


def turns(repeats: int) -> Iterable[tuple[int, str]]:
    """Yield repeats and arms, each arm first in every other one; repeat 0 is not to be counted."""
    for repeat in range(repeats + 1):
        for arm in ARMS if repeat % 2 == 0 else reversed(ARMS):
            yield repeat, arm


def measure_decoding(
    found: dict[str, Server], arguments: argparse.Namespace
) -> dict[str, list[dict[str, float]]]:
    """Return the steps of each repeat, in seconds."""
    result: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for repeat, arm in turns(arguments.repeats):
        source = random.Random(f"{arguments.seed} decode {repeat}")
        prompts = [
            serving_arms.random_prompt(source, arguments, arguments.tokens)
            for _ in range(arguments.batch)
        ]
        step = asyncio.run(decode(found[arm], prompts, arguments.steps))
        if repeat:
            result[arm].append(step)
    return result


def measure_prompts(
    found: dict[str, Server], arguments: argparse.Namespace, length: int
) -> dict[str, list[float]]:
    """Return the seconds of a prompt for each arm, and of those the seconds spent compressing."""
    result: dict[str, list[float]] = {arm: [] for arm in (*ARMS, "compressing")}
    for repeat, arm in turns(arguments.repeats):
        source = random.Random(f"{arguments.seed} prompt {length} {repeat}")
        prompt = serving_arms.random_prompt(source, arguments, length)
        before = found["plugin"].metrics().get(SPENT, 0.0)
        seconds = asyncio.run(prompt_seconds(found[arm], prompt))
        if repeat:
            result[arm].append(seconds)
        if repeat and arm == "plugin":
            result["compressing"].append(found["plugin"].metrics()[SPENT] - before)
    return result


def show_decoding(steps: dict[str, list[dict[str, float]]], batch: int) -> dict[str, Any]:
    """Print the times between two tokens, and return the ratios plugin / stock."""
    ratios: dict[str, Any] = {}
    for name in ("median", "mean"):
        for arm in ARMS:
            values = [step[name] for step in steps[arm]]
            print(f"step of {batch} requests, {name}, {arm}: {common.spread(values)}")
        ratios[f"step_{name}"], words = serving_arms.ratio(steps, name)
        print(f"step, {name}, plugin / stock: {words}")
    return ratios


def show_prompts(taken: dict[str, list[float]], length: int) -> dict[str, Any]:
    """Print the times of a prompt, and return the ratio plugin / stock and compressing's share."""
    for name, values in taken.items():
        print(f"prompt of {length:,} tokens, {name}: {common.spread(values)}")
    ratio = common.median(taken["plugin"]) / common.median(taken["stock"])
    pairs = zip(taken["compressing"], taken["plugin"], strict=True)
    share = common.median([spent / whole for spent, whole in pairs])
    print(f"prompt of {length:,} tokens, plugin / stock: {ratio:.3f}; ", end="")
    print(f"compressing is {share:.1%} of the plugin's")
    return {f"prompt_{length}": ratio, f"compressing_share_{length}": share}


def main() -> None:
    parser = serving_arms.parser(__doc__)
    parser.add_argument("--batch", type=int, default=8, help="requests that decode together")
    parser.add_argument("--tokens", type=int, default=2000, help="of each of their prompts")
    parser.add_argument("--steps", type=int, default=64, help="tokens of each of their answers")
    parser.add_argument("--lengths", default="2000,4000,8000", help="of prompts that are timed")
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.lengths.split(",")]
    longest = max(arguments.tokens + arguments.steps, *(length + 1 for length in lengths))
    each = -(-(arguments.tokens + arguments.steps) // arguments.block_size)
    blocks = 1 + max(arguments.batch * each, -(-longest // arguments.block_size))
    with serving_arms.both(arguments, longest, blocks) as found:
        steps = measure_decoding(found, arguments)
        ratios = show_decoding(steps, arguments.batch)
        prompts = {}
        for length in lengths:
            prompts[length] = measure_prompts(found, arguments, length)
            ratios |= show_prompts(prompts[length], length)
        figures = {"steps_s": steps, "prompts_s": prompts, "ratios": ratios}
        serving_arms.report(arguments, found, figures)


if __name__ == "__main__":
    main()
