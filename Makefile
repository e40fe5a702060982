# The two commands: `make train` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On a machine without a GPU, torch's CPU wheels are far smaller: make train TORCH_ARGS="--index-url <torch's CPU index>"
TORCH_ARGS ?=
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
RANKS ?=
# Processes that run tests: one more than a small machine has cores, as many tests wait for timeouts and for programs.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
# Tests share the cores: compute threads that wait must not spin.
test test-all: export OMP_WAIT_POLICY = PASSIVE
# Tests start hundreds of Python processes: without bytecode on the disk each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-all simulate test-torch test-newest lint format docs dist bench horovod clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.phalanx ## make .venv and install phalanx in it

$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "phalanx needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and with pip: other packages must not bring another build of it.
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt $(TORCH_ARGS) torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

$(VENV)/.phalanx: $(VENV)/.torch pyproject.toml constraints.txt
	$(UV) --editable '.[tensorboard]'
	@touch $@

$(VENV)/.test: $(VENV)/.phalanx
	$(UV) --editable '.[test,docs]'
	$(UV) setuptools wheel
	@# Its models are read by tests; its dependencies are older than those here.
	@$(call optional,kubeflow-training,$(UV) --no-deps kubeflow-training)
	command -v cmake >/dev/null || $(UV) cmake
	@# Horovod compiles for minutes, while the others are fetched.
	@$(call optional,Horovod,$(BIN)/python tools/build_horovod.py) & \
	$(MAKE) --no-print-directory $(VENV)/.engines; status=$$?; wait; exit $$status
	@touch $@

# An engine that cannot be installed on this machine leaves one line, and its tests are skipped.
optional = { $(2) || echo "going on without $(1): its tests are skipped"; }

$(VENV)/.engines: $(VENV)/.phalanx
	@# One extra for each call: a comma would end the argument of `call`.
	@$(call optional,Ray,$(UV) --editable '.[ray]')
	@$(call optional,Ray Serve,$(UV) --editable '.[ray-serve]')
	@$(call optional,MLflow,$(UV) --editable '.[mlflow]')
	@$(call optional,Weights & Biases,$(UV) --editable '.[wandb]')
	@$(call optional,Optuna,$(UV) --editable '.[tune]')
	@# tf-keras would bring TensorFlow with CUDA beside the one that is here.
	@$(call optional,TensorFlow,$(UV) --editable '.[tensorflow-cpu]' && $(UV) --no-deps tf-keras)
	@# DeepSpeed's setup asks the torch that is installed; it compiles nothing now, and what tests use never.
	@$(call optional,DeepSpeed,DS_BUILD_OPS=0 $(UV) --no-build-isolation 'deepspeed>=0.19')
	@touch $@

$(VENV)/.lint: $(VENV)/.phalanx
	$(UV) --editable '.[lint]'
	@touch $@

$(VENV)/.bench: $(VENV)/.test
	$(UV) --editable '.[bench]'
	@touch $@

train: $(VENV)/.phalanx ## train a conv net on the embedded digits, on RANKS ranks (default: 2, or a rank for each GPU)
	$(BIN)/phalanx train digits $(if $(RANKS),--num-workers $(RANKS))

test: $(VENV)/.test ## run the whole suite, in JOBS processes
	$(PYTEST)

test-all: $(VENV)/.test ## the suite with the proofs that take long: three quarters of an hour on two cores
	PHALANX_ALL_TESTS=1 $(PYTEST)

simulate: $(VENV)/.test ## run SEEDS (100,000) histories of simulated launchers with faults: over an hour; a run that was cut continues
	$(BIN)/python -m tests.simulation --seeds 0 $(or $(SEEDS),100000) --progress build/simulation.json

test-torch: ## use Phalanx with the newest torch of the index and the oldest allowed, without constraints (VERSIONS="2.13.0 ...")
	$(PYTHON) tools/try_versions.py torch $(VERSIONS)

test-newest: ## run the tests of Ray, Optuna, transformers and Lightning with their newest versions
	$(PYTHON) tools/try_versions.py newest

lint: $(VENV)/.test $(VENV)/.lint ## ruff, mypy and codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy course/grader --exclude checks
	$(BIN)/codespell

format: $(VENV)/.lint ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.docs: $(VENV)/.phalanx
	$(UV) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## build the documentation into site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(VENV)/.phalanx ## build wheel and source archive into dist/, and try the wheel in an empty environment
	rm -rf dist build
	$(BIN)/uv build --quiet --python $(BIN)/python --out-dir dist .
	$(BIN)/python tools/try_wheel.py dist/*.whl $(TORCH_ARGS)

horovod: $(VENV)/.phalanx ## build Horovod against the installed torch; the wheel is kept under ~/.cache
	$(UV) setuptools wheel
	command -v cmake >/dev/null || $(UV) cmake
	$(BIN)/python tools/build_horovod.py

bench: $(VENV)/.bench ## measure against the rivals (on an otherwise idle machine)
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/step_overhead.py

clean: ## remove the environment and everything generated
	rm -rf $(VENV) site build dist *.egg-info runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
