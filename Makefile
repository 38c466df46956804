# The two commands that matter: `make demo` (a real batch job) and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.installed-core
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip --disable-pip-version-check
CACHE  ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/flexrun

.PHONY: venv demo test lint bench gpu-check clean helm-venv test-helm

venv: $(STAMP)

# What the engine needs, and no more. torch first and pinned: an unpinned torch brings gigabytes of CUDA libraries.
$(CORE): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt "torch==2.13.0"
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

# What tests, lint and experiments need besides.
$(STAMP): $(CORE)
	$(PIP) install -q -c constraints.txt -e ".[test,plots]"
	@touch $@

demo: $(CORE)
	$(BIN)/python examples/fetch_demo_model.py
	$(BIN)/python -m flexrun batch -m "$(CACHE)/models/SmolLM2-135M-Instruct.Q4_1.gguf" \
		-i examples/demo.jsonl -o demo-output.jsonl --overwrite
	$(BIN)/python examples/show_results.py examples/demo.jsonl demo-output.jsonl

test: venv
	$(BIN)/python -m pytest tests

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: venv
	$(BIN)/python -m experiments.side_by_side

# Runs under the interpreter named by PYTHON and installs nothing.
gpu-check:
	$(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON)) experiments/gpu_check.py

# HELM pins older packages than we use, so it has an environment of its own.
HELM_VENV ?= .venv-helm
HELM_PIP  := $(HELM_VENV)/bin/python -m pip --disable-pip-version-check

helm-venv: $(HELM_VENV)/.installed

$(HELM_VENV)/.installed: setup.cfg constraints-helm.txt
	$(PYTHON) -m venv $(HELM_VENV)
	$(HELM_PIP) install -q -c constraints-helm.txt "torch==2.13.0" "torchvision==0.28.0"
	$(HELM_PIP) install -q -c constraints-helm.txt -e ".[helm]" "pytest>=8" "pytest-timeout>=2.3"
	@# A torchvision built for another torch keeps transformers from being imported; texts need none.
	$(HELM_VENV)/bin/python -c "import torchvision" 2>/dev/null || $(HELM_PIP) uninstall -q -y torchvision
	@touch $@

test-helm: helm-venv
	$(HELM_VENV)/bin/python -m pytest -m helm tests/helm

clean:
	rm -rf $(VENV) $(HELM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
