"""Does a server stay right under load? Many requests of all kinds, in a pool that is too small.

One server with the plugin gets random requests: short and long prompts, some that begin alike,
answers wanted once or several times, greedy or sampled with a seed, streamed or not, with
priorities; some clients leave before their answer is complete, some prompts are too long. The pool
is so small that requests are preempted. Afterwards

- every complete answer is that of a quiet server with room for all and no prefix cache, which is
  asked one by one (see `soak_answers.py`);
- no block is held any more;
- no request failed, except those that must, and the log has no error.

It ends with exit code 1 and says what is wrong if anything is, and after `--limit` seconds.

    python benchmarks/serving_soak.py [--model M] [--requests 500] [--budget 256] [--longest 2000]
        [--blocks N] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import tempfile
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import servers
import serving_arms
from servers import PLUGIN, RefusedError, Server, Start
from soak_answers import Choice, Comparison, choices_of

EVERY_NTH_IS_TOO_LONG = 40
ALIKE = 20
"""Requests in a row of which most begin alike."""


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        prompt: tokens.
        new: of each answer.
        answers: how many.
        temperature: 0 for the likeliest tokens.
        seed: for others.
        priority: lower ones first.
        streamed: the answer comes in parts.
        leaves_after: parts (or tenths of a second, if it is not streamed) after which the client
            leaves; None if it stays.
        refused: it must be, as too long.
    """

    prompt: list[int]
    new: int
    answers: int
    temperature: float
    seed: int
    priority: int
    streamed: bool
    leaves_after: int | None
    refused: bool

    def body(self) -> dict[str, Any]:
        """Return it as the server takes it, without its priority."""
        return {
            "prompt": self.prompt,
            "max_tokens": self.new,
            "n": self.answers,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def make_requests(count: int, vocabulary: int, longest: int, new: int, seed: int) -> list[Asked]:
    """Return random requests, the same for the same arguments.

    Args:
        count: how many.
        vocabulary: tokens there are.
        longest: prompt, in tokens; what is too long has `new` tokens more, and their answer.
        new: tokens of an answer at most.
        seed: of all.
    """
    source = random.Random(seed)
    beginnings = [source.choices(range(vocabulary), k=longest) for _ in range(0, count, ALIKE)]

    def request(number: int) -> Asked:
        refused = number % EVERY_NTH_IS_TOO_LONG == EVERY_NTH_IS_TOO_LONG - 1
        length = source.randint(1, source.choice([longest, longest // 4]))
        if refused:
            length = longest + new + 1
        shared = beginnings[number // ALIKE][: int(length * source.choice([0, 0.5, 0.9, 1]))]
        sampled, leaves = source.random() < 0.4, source.random() < 0.25
        return Asked(
            prompt=shared + source.choices(range(vocabulary), k=length - len(shared)),
            new=source.randint(1, new),
            answers=source.randint(1, 3) if sampled else 1,  # vLLM refuses several greedy ones
            temperature=1.0 if sampled else 0.0,
            seed=source.randrange(2**31),
            priority=source.randint(-2, 2),
            streamed=source.random() < 0.5,
            leaves_after=source.randint(1, new // 2) if leaves and not refused else None,
            refused=refused,
        )

    return [request(number) for number in range(count)]


async def ask(client: Any, server: Server, asked: Asked, **more: Any) -> list[Choice] | None:
    """Send a request and return its answers, or None if the client left before they were complete.

    Raises:
        RefusedError: there is no answer.
    """
    body = asked.body() | more
    if not asked.streamed:
        waiting = servers.post(client, server, **body)
        patience = None if asked.leaves_after is None else asked.leaves_after / 10
        try:
            return choices_of([await asyncio.wait_for(waiting, patience)])
        except TimeoutError:
            return None
    parts: list[dict[str, Any]] = []
    async with aclosing(servers.stream(client, server, **body)) as stream:
        async for part in stream:
            parts.append(part)
            if len(parts) == asked.leaves_after:
                return None
    return choices_of(parts)


@dataclass
class Storm:
    """What came back.

    Attributes:
        answers: by the request's number; of those that were not complete, there is none.
        left: requests whose client left.
        refused: requests that were refused as they must be.
        faults: in sentences.
    """

    answers: dict[int, list[Choice]] = field(default_factory=dict)
    left: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)


async def storm(
    server: Server, requests: list[Asked], at_once: int, limit: float, priorities: bool = False
) -> Storm:
    """Send all requests, some of them at once, and return what came back.

    Args:
        server: asked.
        requests: in the order in which they are sent.
        at_once: how many may be on their way.
        limit: seconds for all of them.
        priorities: are told.
    """
    result, gate = Storm(), asyncio.Semaphore(at_once)

    async def one(number: int, asked: Asked) -> None:
        async with gate:
            try:
                order = {"priority": asked.priority} if priorities else {}
                found = await ask(client, server, asked, **order)
            except RefusedError as refused:
                if asked.refused and refused.status == 400:
                    result.refused += 1
                else:
                    result.faults.append(f"request {number}: {refused}")
                return
            except aiohttp.ClientError as broken:
                result.faults.append(f"request {number}: {broken!r}")
                return
        if found is None:
            result.left += 1
        elif asked.refused:
            result.faults.append(f"request {number} is too long but was answered")
        else:
            result.answers[number] = found

    async with servers.session(limit) as client:
        try:
            async with asyncio.timeout(limit):
                await asyncio.gather(*(one(*pair) for pair in enumerate(requests)))
        except TimeoutError:
            done = len(result.answers) + result.left + result.refused
            result.faults.append(f"{limit} seconds were enough for {done} requests only")
    return result


async def come_to_rest(server: Server, patience: float = 60) -> list[str]:
    """Wait until nothing is held any more and return what still is, in sentences."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    until = time.monotonic() + patience
    async with servers.session(patience) as client:
        while True:
            # vLLM's gauges are those of its last step.
            await servers.post(client, server, prompt=[1], max_tokens=1)
            metrics = server.metrics()
            held = [f"{name} is {metrics[name]} at the end" for name in names if metrics[name] != 0]
            if not held or time.monotonic() > until:
                return held
            await asyncio.sleep(0.5)


def logged_errors(server: Server) -> list[str]:
    """Return the lines of a server's log that tell of errors."""
    return [
        f"log: {line}"
        for line in server.log.read_text().splitlines()
        if re.search(r"\b(ERROR|CRITICAL)\b", line) or line.startswith("Traceback")
    ]


def soak(server: Server, quiet: Server, requests: list[Asked], **bounds: Any) -> dict[str, Any]:
    """Send requests to a server, compare the answers with a quiet one's, and return the figures.

    Args:
        server: with a small pool, prefix cache and priorities.
        quiet: the same with room for all, and without prefix cache.
        requests: see `make_requests`.
        bounds: `at_once`, `limit` (seconds) and `tolerance` (of log probabilities).

    Returns:
        counts, and `faults`: sentences, none if all is well.
    """
    tolerance = bounds.pop("tolerance")
    begun, before = time.monotonic(), server.metrics()
    stormy = asyncio.run(storm(server, requests, priorities=True, **bounds))
    seconds = time.monotonic() - begun
    try:
        held, after = asyncio.run(come_to_rest(server)), server.metrics()
    except (aiohttp.ClientError, OSError, RefusedError) as gone:
        held, after = [f"the server does not answer any more: {gone!r}"], before
    faults = stormy.faults + held + logged_errors(server)
    counted = {
        "preemptions": "vllm:num_preemptions_total",
        "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    }
    counts = {label: after[name] - before[name] for label, name in counted.items()}
    faults += [f"there were no {label}" for label, count in counts.items() if count == 0]
    numbers = sorted(stormy.answers)
    calm = [replace(requests[number], streamed=False, leaves_after=None) for number in numbers]
    again = asyncio.run(storm(quiet, calm, at_once=1, limit=bounds["limit"]))
    comparison = Comparison(tolerance)
    for place, wanted in again.answers.items():
        number = numbers[place]
        sampled = requests[number].temperature > 0
        comparison.add(f"request {number}", sampled, stormy.answers[number], wanted)
    faults += [f"quiet server: {fault}" for fault in again.faults + logged_errors(quiet)]
    return {
        "requests": len(requests),
        "complete": len(numbers),
        "left": stormy.left,
        "refused": stormy.refused,
        "seconds": seconds,
        **counts,
        **asdict(comparison),
        "faults": faults + comparison.faults + comparison.rare(),
    }


def starts(
    arguments: argparse.Namespace, settings: list[str], groups: int, folder: Path
) -> list[Start]:
    """Return how the two servers are started: that for the storm, and the quiet one.

    Args:
        arguments: `model`, `dtype`, `block_size`, `longest`, `new`, `blocks`, `threads`.
        settings: the plugin's, as options.
        groups: of layers.
        folder: for logs.
    """
    total = arguments.longest + arguments.new
    each = groups * -(-total // arguments.block_size)
    environment = servers.environment(arguments.threads)

    def start(name: str, blocks: int, *more: str) -> Start:
        options = servers.options(
            arguments.model, arguments.dtype, total, blocks, arguments.block_size
        )
        options += [*settings, "--enforce-eager", *more]
        return Start(PLUGIN, arguments.model, options, environment, folder / f"{name}.log")

    small = arguments.blocks or each + each // 8
    return [
        start("storm", small, "--scheduling-policy", "priority", "--enable-prefix-caching"),
        start("quiet", 4 * each, "--no-enable-prefix-caching"),
    ]


def main() -> None:
    parser = serving_arms.parser(__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--longest", type=int, default=2000, help="prompt, in tokens")
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer, at most")
    parser.add_argument(
        "--blocks", type=int, help="of the pool; by default those of the longest and an eighth more"
    )
    parser.add_argument("--at-once", type=int, default=24, help="requests on their way")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all requests")
    parser.add_argument("--tolerance", type=float, default=0.01, help="of log probabilities")
    arguments = parser.parse_args()
    servers.end_cleanly_when_told_to()
    shape, plan = serving_arms.shape_of(arguments.model), serving_arms.settings_of(arguments)
    requests = make_requests(
        arguments.requests, shape.vocab_size, arguments.longest, arguments.new, arguments.seed
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        settings = serving_arms.plugin_options(arguments)
        with servers.running(*starts(arguments, settings, plan.groups, folder)) as (server, quiet):
            figures = soak(
                server,
                quiet,
                requests,
                at_once=arguments.at_once,
                limit=arguments.limit,
                tolerance=arguments.tolerance,
            )
            for name, value in figures.items():
                if name != "faults":
                    print(f"{name.replace('_', ' ')}: {value}")
            serving_arms.report(arguments, {"storm": server, "quiet": quiet}, figures)
    for fault in figures["faults"]:
        print(fault, file=sys.stderr)
    sys.exit(bool(figures["faults"]))


if __name__ == "__main__":
    main()
