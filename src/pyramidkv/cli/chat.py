"""`pyramidkv chat`: a conversation about one document."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import PyramidKVError
from ..records import format_bytes
from . import contexts, display, inputs, options

if TYPE_CHECKING:
    from ..chat import Chat

HELP = "/reset forgets the turns, /save FILE keeps document and turns, /exit leaves"


@options.taking(
    options.AMOUNTS,
    options.METHOD_OPTIONS,
    options.PLUGINS,
    options.GENERATION,
    options.MODEL,
    max_new_tokens=512,
)
def chat(
    model: options.Model,
    context: options.ContextFile = None,
    load: options.Load = None,
    **given: Any,
) -> None:
    """Talk about one document. Ctrl-C stops an answer, /exit or Ctrl-D leaves."""
    given |= {"model": model, "context": context, "load": load}
    if str(context) == "-":
        raise inputs.InputError(
            "the document cannot come from standard input, where the questions come from; give a "
            "file to --context"
        )
    read = [context, *options.files_read(given), *options.load_plugins(given)]
    text = contexts.check(given)

    options.quiet_transformers()
    from transformers import set_seed

    opened, seconds = contexts.open_context(given, text)
    messages = display.console(stderr=True)
    messages.print(contexts.describe(opened, seconds, load is not None))
    messages.print(HELP)
    conversation = opened.chat()
    if conversation.turns:
        messages.print(f"going on after {len(conversation.turns)} turns")
    set_seed(given["seed"])
    for line in _lines():
        try:
            if line.startswith("/"):
                if _leaves(line, conversation, read):
                    return
                continue
            _answer(conversation, line, given["max_new_tokens"], given["temperature"])
            messages.print(_status(conversation), style="dim")
        except PyramidKVError as error:
            typer.echo(f"pyramidkv: {error}", err=True)
        except KeyboardInterrupt:
            typer.echo("\n(interrupted)", err=True)


def _lines() -> Iterator[str]:
    """Yield what the user types, line by line, without blank ones, until the end of the input."""
    if sys.stdin is None:  # closed
        return
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  (gives `input` editing and history)
    while True:
        try:
            line = input("> ") if interactive else _read_line()
        except EOFError:
            return
        except UnicodeDecodeError:
            typer.echo("pyramidkv: this line is not UTF-8 text", err=True)
        except KeyboardInterrupt:
            typer.echo("\n(/exit or Ctrl-D leaves)", err=True)
        else:
            if line.strip():
                yield line.strip()


def _read_line() -> str:
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode()


def _leaves(line: str, conversation: Chat, read: Sequence[Path | None]) -> bool:
    """Carry out a command and return whether it ends the conversation."""
    command, _, argument = line.partition(" ")
    if command == "/exit":
        return True
    if command == "/reset":
        conversation.reset()
        typer.echo("the turns are forgotten; the document stays", err=True)
    elif command == "/save" and argument.strip():
        path = Path(argument.strip()).expanduser()
        model = conversation.context.model.config._name_or_path
        inputs.check_files({"/save": path}, read, model)
        conversation.save(path)
        typer.echo(f"saved as {str(path)!r}", err=True)
    elif command == "/save":
        typer.echo("give the file's name: /save FILE", err=True)
    else:
        typer.echo(f"{command} is no command; {HELP}", err=True)
    return False


def _answer(conversation: Chat, question: str, max_new_tokens: int, temperature: float) -> None:
    with _interruptible() as stopped:
        try:
            conversation.ask(
                question,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                on_text=lambda piece: typer.echo(piece, nl=False),
                stop=stopped,
            )
        finally:
            typer.echo()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a wish to stop, which the yielded function reports."""
    wished = False

    def wish(*_: Any) -> None:
        nonlocal wished
        if wished:
            raise KeyboardInterrupt
        wished = True

    before = signal.signal(signal.SIGINT, wish) or signal.SIG_DFL
    try:
        yield lambda: wished
    except KeyboardInterrupt:  # asked twice: the turn is given up
        typer.echo("\n(the answer is dropped)", err=True)
    finally:
        signal.signal(signal.SIGINT, before)


def _status(conversation: Chat) -> str:
    cache = conversation.cache
    kept = [lengths[0] for lengths in cache.kept_lengths()]
    return (
        f"[{cache.tokens_seen:,} tokens seen, {sum(kept) / len(kept):,.0f} kept per layer, "
        f"KV cache {format_bytes(cache.kv_bytes)}]"
    )
