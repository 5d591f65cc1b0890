"""How many requests does one cache serve? Stock vLLM against the plugin, with the same bytes.

Two real servers, which take turns in one run. In each repeat both get the same fresh prompts of
random tokens, so that nothing is found in a prefix cache, all at once or at a rate. The pool is so
small that stock vLLM runs about two requests at a time.

    python benchmarks/serving.py [--model M] [--budget 256] [--groups 5] [--requests 24]
        [--shortest 700] [--longest 3000] [--new 96] [--blocks 136] [--rate 2] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import common
import servers
import serving_arms
from servers import Server

FIGURES = {
    "tokens_per_s": "output tokens per second",
    "running": "requests running, mean",
    "preemptions": "preemptions",
    "first_token_p50_s": "time to first token, p50, s",
    "first_token_p95_s": "time to first token, p95, s",
    "per_token_s": "time per output token, s",
}


@dataclass(frozen=True)
class Answer:
    """One request's times, in seconds.

    Attributes:
        sent, first, last: when it was sent, and when its first and last token arrived.
        tokens: of its answer.
    """

    sent: float
    first: float
    last: float
    tokens: int


async def ask(client: Any, server: Server, prompt: list[int], new: int) -> Answer:
    """Send one request and take in its answer as a stream."""
    sent = time.perf_counter()
    arrived: list[float] = []
    tokens = 0
    async for part in servers.stream(
        client,
        server,
        prompt=prompt,
        max_tokens=new,
        temperature=0,
        ignore_eos=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ):
        if part["usage"]["completion_tokens"] > tokens:
            arrived.append(time.perf_counter())
            tokens = part["usage"]["completion_tokens"]
    if tokens != new:
        raise RuntimeError(f"{tokens} tokens arrived, {new} were asked for")
    return Answer(sent, arrived[0], arrived[-1], tokens)


async def watch(server: Server, every: float, running: list[float]) -> None:
    """Note the number of running requests, again and again."""
    while True:
        await asyncio.sleep(every)
        metrics = await asyncio.to_thread(server.metrics)
        running.append(metrics["vllm:num_requests_running"])


async def load(
    server: Server, prompts: list[list[int]], delays: list[float], arguments: argparse.Namespace
) -> dict[str, float]:
    """Send all requests, each after its delay, and return the figures of `FIGURES`."""

    async def later(prompt: list[int], delay: float) -> Answer:
        await asyncio.sleep(delay)
        return await ask(client, server, prompt, arguments.new)

    before = server.metrics()
    running: list[float] = []
    async with servers.session(arguments.limit) as client:
        watching = asyncio.create_task(watch(server, arguments.poll, running))
        answers = await asyncio.gather(*map(later, prompts, delays))
        watching.cancel()
    after = server.metrics()
    seconds = max(a.last for a in answers) - min(a.sent for a in answers)
    firsts = [a.first - a.sent for a in answers]
    steps = [(a.last - a.first) / (a.tokens - 1) for a in answers]
    preemptions = "vllm:num_preemptions_total"
    return {
        "tokens_per_s": sum(a.tokens for a in answers) / seconds,
        "running": statistics.mean(running) if running else 0.0,  # over before the first look
        "preemptions": after[preemptions] - before[preemptions],
        "first_token_p50_s": common.median(firsts),
        "first_token_p95_s": statistics.quantiles(firsts, n=20, method="inclusive")[-1],
        "per_token_s": common.median(steps),
        "seconds": seconds,
    }


def requests(arguments: argparse.Namespace, repeat: int) -> tuple[list[list[int]], list[float]]:
    """Return a repeat's prompts, and when each is sent, in seconds from the start."""
    source = random.Random(f"{arguments.seed} {repeat}")
    lengths = [
        source.randint(arguments.shortest, arguments.longest) for _ in range(arguments.requests)
    ]
    prompts = [serving_arms.random_prompt(source, arguments, tokens) for tokens in lengths]
    delays, now = [], 0.0
    for _ in prompts:
        delays.append(now)
        now += 0.0 if math.isinf(arguments.rate) else source.expovariate(arguments.rate)
    return prompts, delays


def compression(arguments: argparse.Namespace) -> float:
    """Return how many times fewer tokens a prompt of mean length has after compression."""
    mean = (arguments.shortest + arguments.longest) // 2
    kept = serving_arms.settings_of(arguments).kept(mean, arguments.block_size)
    return mean / statistics.mean(kept)


def show(runs: dict[str, list[dict[str, float]]]) -> dict[str, float | None]:
    """Print medians with lowest and highest, and return the ratios plugin / stock."""
    ratios = {}
    print(f"{'':<30}{'stock':>28}{'plugin':>28}  plugin / stock")
    for name, label in FIGURES.items():
        cells = []
        for arm in ("stock", "plugin"):
            values = [run[name] for run in runs[arm]]
            low, middle, high = (
                f"{v:.4g}" for v in (min(values), common.median(values), max(values))
            )
            cells.append(f"{middle} ({low} to {high})")
        ratios[name], words = serving_arms.ratio(runs, name)
        print(f"{label:<30}{cells[0]:>28}{cells[1]:>28}  {words}")
    return ratios


def main() -> None:
    parser = serving_arms.parser(__doc__)
    parser.add_argument("--requests", type=int, default=24, help="in each repeat")
    parser.add_argument("--shortest", type=int, default=700, help="prompt, in tokens")
    parser.add_argument("--longest", type=int, default=3000, help="prompt, in tokens")
    parser.add_argument("--new", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--blocks", type=int, default=136, help="of the stock server's pool")
    parser.add_argument(
        "--rate", type=float, default=math.inf, help="requests per second, at random times"
    )
    parser.add_argument("--poll", type=float, default=0.5, help="seconds between looks at /metrics")
    parser.add_argument("--limit", type=float, default=1800, help="seconds a request may take")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"stock": [], "plugin": []}
    squeezed = compression(arguments)
    print(f"a prompt of mean length is compressed {squeezed:.1f} times")
    with serving_arms.both(arguments, arguments.longest + arguments.new, arguments.blocks) as found:
        warm = random.Random(f"{arguments.seed} warm-up")
        for server in found.values():
            prompt = serving_arms.random_prompt(warm, arguments, arguments.shortest)
            asyncio.run(load(server, [prompt] * 2, [0.0] * 2, arguments))
        for repeat in range(arguments.repeats):
            prompts, delays = requests(arguments, repeat)
            for arm in list(found) if repeat % 2 == 0 else reversed(found):
                runs[arm].append(asyncio.run(load(found[arm], prompts, delays, arguments)))
                print(f"repeat {repeat}, {arm}: {runs[arm][-1]}", flush=True)
        ratios = show(runs)
        figures = {"runs": runs, "ratios": ratios, "compression": squeezed}
        serving_arms.report(arguments, found, figures)


if __name__ == "__main__":
    main()
