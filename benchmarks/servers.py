"""vLLM's servers, stock and with the plugin, as processes of one's own, and requests to them.

Traffic goes to 127.0.0.1 only, and only processes that were started here are ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

NAME = "served"
"""Of the model, in requests."""

STOCK = ["-m", "vllm.entrypoints.openai.api_server", "--model"]
PLUGIN = ["-m", "pyramidkv", "serve"]
"""What Python is started with; the model comes next."""

SPACE_GIB = 1
"""Cache that vLLM is told to take; `--num-gpu-blocks-override` is what it really takes."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        address: such as `http://127.0.0.1:8000`.
        log: all it wrote.
        command: it was started with.
    """

    address: str
    log: Path
    command: list[str]

    def get(self, path: str) -> bytes:
        """Return what a GET request brings."""
        with urllib.request.urlopen(f"{self.address}{path}", timeout=60) as response:
            return bytes(response.read())

    def version(self) -> str:
        """Return vLLM's version."""
        return str(json.loads(self.get("/version"))["version"])

    def metrics(self) -> dict[str, float]:
        """Return vLLM's gauges and counters by name, added up over their labels."""
        return _parse_metrics(self.get("/metrics").decode())

    def blocks(self) -> tuple[int, int]:
        """Return the pool's blocks, and how many would fit into `SPACE_GIB`, as vLLM logged them.

        Raises:
            ValueError: the log does not tell.
        """
        found = re.search(
            r"Overriding num_gpu_blocks=(\d+) with num_gpu_blocks_override=(\d+)",
            self.log.read_text(),
        )
        if found is None:
            raise ValueError(f"vLLM's log does not tell its number of blocks: {self.log}")
        return int(found[2]), int(found[1])


def _parse_metrics(text: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.partition("{")[0].split()[0], float(line.rsplit(maxsplit=1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


def options(model: str, dtype: str, longest: int, blocks: int, block_size: int) -> list[str]:
    """Return vLLM's options that every server here has.

    Args:
        model: a folder without a tokenizer is served all the same, for prompts in tokens.
        dtype: of weights and cache.
        longest: tokens of the longest request, answer included.
        blocks: of the pool.
        block_size: tokens of a block.
    """
    given = {
        "dtype": dtype,
        "max-model-len": longest,
        "num-gpu-blocks-override": blocks,
        "block-size": block_size,
        "served-model-name": NAME,
        "uvicorn-log-level": "warning",
    }
    result = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    if Path(model).is_dir() and not list(Path(model).glob("tokenizer*")):
        result.append("--skip-tokenizer-init")
    return result


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a server with this many threads for computing."""
    result = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    result |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(SPACE_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    result.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # as users run it
    return result


@dataclass(frozen=True)
class Start:
    """How a server is started.

    Attributes:
        python: `STOCK`, `PLUGIN` or a script that takes the same arguments.
        model: it serves.
        options: further ones.
        environment: of the process.
        log: file for all it writes.
    """

    python: list[str]
    model: str
    options: list[str]
    environment: dict[str, str]
    log: Path


@contextmanager
def running(*starts: Start, patience: float = 600) -> Iterator[list[Server]]:
    """Start servers side by side, and end them and all their processes afterwards.

    Args:
        starts: one for each server.
        patience: seconds until each must answer.

    Raises:
        RuntimeError: one ended or does not answer; the message has its log's end.
    """
    with ExitStack() as stack:
        launched = [stack.enter_context(_launched(start)) for start in starts]
        until = time.monotonic() + patience
        for server, process in launched:
            _wait(server, process, until)
        yield [server for server, _ in launched]


@contextmanager
def _launched(start: Start) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    port = _free_port()
    command = [sys.executable, *start.python, start.model, *start.options]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with start.log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=start.environment,
            start_new_session=True,
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", start.log, command), process
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait(server: Server, process: subprocess.Popen[bytes], until: float) -> None:
    while time.monotonic() < until and process.poll() is None:
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server does not answer:\n{server.log.read_text()[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and whatever is left of its session."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_cleanly_when_told_to() -> None:
    """Have SIGTERM end this process as Ctrl-C does, so that no server outlives it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def session(patience: float) -> aiohttp.ClientSession:
    """Return a client for any number of requests at once, each of at most `patience` seconds."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(patience)
    )


class RefusedError(RuntimeError):
    """A server's answer other than 200."""

    def __init__(self, status: int, text: str):
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


async def post(client: aiohttp.ClientSession, server: Server, **body: Any) -> dict[str, Any]:
    """Ask for completions and return the answer.

    Raises:
        RefusedError: there is none.
    """
    async with client.post(f"{server.address}/v1/completions", json=body | {"model": NAME}) as got:
        if got.status != 200:
            raise RefusedError(got.status, await got.text())
        answer: dict[str, Any] = await got.json()
        return answer


async def stream(
    client: aiohttp.ClientSession, server: Server, **body: Any
) -> AsyncIterator[dict[str, Any]]:
    """Ask for completions and yield their parts as they arrive.

    Raises:
        RefusedError: there are none, or the server broke off.
    """
    asked = body | {"model": NAME, "stream": True}
    async with client.post(f"{server.address}/v1/completions", json=asked) as got:
        if got.status != 200:
            raise RefusedError(got.status, await got.text())
        async for line in got.content:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data:
                part = json.loads(data)
                if "error" in part:
                    raise RefusedError(500, str(part["error"]))
                yield part
    raise RefusedError(500, "the stream ended without saying so")
