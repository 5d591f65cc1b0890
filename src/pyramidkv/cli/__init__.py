"""The command line. Commands are thin: they read input, call the package, show records."""

from __future__ import annotations

import sys

import typer

from ..errors import PyramidKVError
from .ask import ask
from .bench import bench
from .chat import chat
from .demo import demo
from .evaluate import eval_app
from .generate import generate
from .methods import methods
from .plan import plan
from .profile import profile
from .report import report
from .serve import serve
from .simulate import simulate

app = typer.Typer(
    name="pyramidkv",
    help="Generate from long prompts with a compressed KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(ask)
app.command()(chat)
app.command()(methods)
app.command()(plan)
app.command()(profile)
app.command()(simulate)
app.command()(bench)
app.add_typer(eval_app)
app.command()(report)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command()(demo)


def _version(show: bool) -> None:
    if show:
        from .. import __version__

        typer.echo(f"pyramidkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake ends with one sentence and exit code 2."""
    try:
        app()
    except PyramidKVError as error:
        typer.echo(f"pyramidkv: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; there is no one to tell
        sys.exit(1)
