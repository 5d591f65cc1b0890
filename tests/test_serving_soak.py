"""A server under load in a pool that is too small: see `benchmarks/serving_soak.py`."""

from __future__ import annotations

from argparse import Namespace
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM (make test-vllm)", allow_module_level=True)

import servers
from serving_soak import make_requests, soak, starts
from test_serving_vllm import BLOCK, BUDGET, LAYERS, folder  # noqa: F401
from tiny import VOCABULARY


def test_sixty_requests_of_all_kinds_leave_nothing_and_get_what_they_would_alone(
    folder,  # noqa: F811
    tmp_path,
):
    arguments = Namespace(
        model=folder,
        dtype="float32",
        block_size=BLOCK,
        longest=400,
        new=96,
        blocks=None,
        threads=1,
    )
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in BUDGET.items()]
    requests = make_requests(60, VOCABULARY, arguments.longest, arguments.new, seed=1)
    with servers.running(*starts(arguments, settings, LAYERS, tmp_path)) as (server, quiet):
        found = soak(server, quiet, requests, at_once=24, limit=300, tolerance=1e-4)
    assert found["faults"] == []
    assert (found["near_ties"], found["sampled_others"]) == (0, 0)
    assert found["refused"] == sum(asked.refused for asked in requests) == 1
    assert found["complete"] + found["left"] + found["refused"] == 60
    assert found["complete"] >= 40
    assert found["left"] >= 5
    assert found["preemptions"] >= 3
    assert found["equal"] >= 20
    assert found["sampled_equal"] >= 20
