# Each target prepares what it needs: an environment outside this folder (tools/environment.py).
# EPL_PYTHON=/path/to/python3.9 chooses the Python; HOROVOD=0 leaves out Horovod and MPI.

HOROVOD ?= 1
EXAMPLE ?= examples/char_transformer.py
ARGS ?=
PYTEST_ARGS ?=
export TF_CPP_MIN_LOG_LEVEL ?= 2

PREPARE := python3 tools/environment.py $(if $(filter 0,$(HOROVOD)),--without-horovod)
# Sets $$PY in a recipe's shell, or ends it; mpirun and the like lie beside the interpreter.
ENVIRONMENT = PY=$$($(PREPARE)) && export PATH="$$(dirname "$$PY"):$$PATH" PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}"

.DEFAULT_GOAL := help
.PHONY: help python train test test-all lint docs docs-check clean

help: ## this text
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 16

python: ## print the interpreter of the environment (prepared first, minutes on a new machine)
	@$(PREPARE)

train: ## train a character transformer on two ranks (HOROVOD=0: on two local devices) and compare with one device
ifeq ($(HOROVOD),0)
	@$(ENVIRONMENT) && EPL_CLUSTER_DEVICES_PER_WORKER=2 "$$PY" $(EXAMPLE) $(ARGS)
else
	@$(ENVIRONMENT) && "$$PY" -m epl.cli.launch --num_workers 2 $(EXAMPLE) $(ARGS)
endif

test: lint docs-check ## lint, types, documentation and the tests that are not slow
	@$(ENVIRONMENT) && "$$PY" tools/run_tests.py $(PYTEST_ARGS)

test-all: lint docs-check ## the same with the slow tests
	@$(ENVIRONMENT) && "$$PY" tools/run_tests.py --all $(PYTEST_ARGS)

lint: ## ruff and mypy
	@$(ENVIRONMENT) && "$$PY" -m ruff check . && if "$$PY" -c "import mypy" 2>/dev/null; then "$$PY" -m mypy; else echo "mypy: not part of this Python's environment, left out"; fi

docs: ## write the tables of configuration keys and devices into the documentation
	@$(ENVIRONMENT) && "$$PY" tools/generate_config_docs.py

docs-check: ## fail if those tables are stale
	@$(ENVIRONMENT) && "$$PY" tools/generate_config_docs.py --check

clean: ## remove what builds and tests leave in this folder
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
