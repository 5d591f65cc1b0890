"""The model `pyramidkv` of lm-evaluation-harness: its Hugging Face model on compressed caches."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from lm_eval.models.huggingface import HFLM

from ..compression import Compression, make_compression
from ..engine import compress
from ..errors import HarnessError
from ..method_options import Options
from ..plugins import describe_plugins, load_plugin
from ..schedule_profile import ScheduleProfile

_AMOUNTS = ("method", "budget", "compression_ratio", "decode_budget", "decode_interval")
_OPTIONS = (*_AMOUNTS, *(field.name for field in dataclasses.fields(Options)), "schedule", "plugin")


def _unknown(name: str) -> HarnessError:
    return HarnessError(
        f"the model has no argument {name!r}; the options of compression are: {', '.join(_OPTIONS)}"
    )


def _check_names(given: Iterable[str]) -> None:
    """Refuse names that `hf` would pass on to what loads a model, if it is loaded already."""
    known = inspect.signature(HFLM.__init__).parameters
    for name in given:
        if name not in known:
            raise _unknown(name)


class PyramidKVLM(HFLM):  # type: ignore[misc]
    """The harness's `hf` model, whose generations use a compressed cache.

    Prompts, chat templates, batches, truncation and stop sequences are those of `hf`: with
    `method="full"` so are the texts.

    Args:
        pretrained: as for `hf`: a hub id, a folder or a loaded model.
        given: what `make_compression` takes, by its names (`schedule` is the path of a schedule
            file, `plugin` that of a file with the method); everything else is an argument of `hf`.

    Raises:
        PluginError, MethodError, BudgetError, ProfileError: before the model is loaded.
        UnsupportedModelError, AttentionError, HarnessError: before anything is generated.
    """

    def __init__(self, pretrained: Any = None, **given: Any):
        if pretrained is None:
            raise HarnessError("no model is given; give pretrained=, a hub id or a folder")
        chosen = {name: given.pop(name) for name in _OPTIONS if name in given}
        self._plugins = [str(chosen.pop("plugin"))] if "plugin" in chosen else []
        for file in self._plugins:
            load_plugin(file)
        if "schedule" in chosen:
            chosen["profile"] = ScheduleProfile.read(Path(str(chosen.pop("schedule"))))
        self.compression: Compression = make_compression(**chosen)
        if not isinstance(pretrained, str):
            _check_names(given)
        try:
            super().__init__(pretrained, **given)
        except TypeError as error:
            found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if found and found[1] in given:
                raise _unknown(found[1]) from error
            raise
        with self._compressed():
            pass  # refuses what cannot be compressed before the harness makes its requests

    def _compressed(self) -> AbstractContextManager[Compression]:
        compression = self.compression
        return compress(self.model, compression.method, **compression.amounts)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Generate the continuation of each request's prompt, as `hf` does."""
        with self._compressed():
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
        """Refuse to score.

        Raises:
            HarnessError: always; the score would be the full cache's.
        """
        raise HarnessError(
            "log-likelihoods are computed in the pass over the prompt, where nothing is compressed "
            "yet, so they tell nothing about a compressed cache; choose tasks whose output_type is "
            "generate_until, or --model hf for the full cache"
        )

    loglikelihood_rolling = loglikelihood

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness notes about the model in its results, and the compression."""
        noted: dict[str, Any] = {"compression": self.compression.parameters()}
        if self._plugins:
            noted["plugins"] = describe_plugins(self._plugins)
        return {**super().get_model_info(), **noted}
