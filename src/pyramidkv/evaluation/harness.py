"""EleutherAI's lm-evaluation-harness, with the model `pyramidkv` among its models.

The harness finds models only in its own registry and has no entry point for others. Importing this
module enters ours, for `lm_eval.simple_evaluate(model="pyramidkv", ...)`; running it as
`python -m pyramidkv.evaluation.harness` does so before the harness's own command line.
"""

from __future__ import annotations

import sys
from importlib import import_module

from ..errors import HarnessError, PyramidKVError

MODEL = "pyramidkv"
"""The name the harness knows the model by."""

_CLASS = "pyramidkv.evaluation.harness_model:PyramidKVLM"


def register() -> None:
    """Enter the model into the harness's registry; loaded when it is asked for.

    Raises:
        HarnessError: the harness is not installed.
    """
    try:
        # Its own models first: it enters them by itself into an empty registry only.
        import_module("lm_eval.models")
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        raise HarnessError(
            f"lm-evaluation-harness cannot be used, because {missing} is not installed; "
            "pip install 'pyramidkv[harness]'"
        ) from None
    if MODEL not in model_registry:
        model_registry.register(MODEL, target=_CLASS)


def main() -> None:
    """Run the harness's command line; a user's mistake ends with one sentence and exit code 2."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except PyramidKVError as error:
        sys.stderr.write(f"pyramidkv: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
else:
    register()
