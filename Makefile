PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROJECT := pyproject.toml constraints.txt

.PHONY: demo test check bench clean

demo: $(VENV)/.train  ## train a small model on real digits, stream pixels into it, draw what it sees
	$(BIN)/constmem demo

test: $(VENV)/.dev  ## the tests, then once more with every shape annotation checked at run time
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu" $(ARGS)
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not gpu and not compiles and not data" tests/core/test_state.py tests/core/test_block.py tests/neural_processes/test_neural_processes.py tests/test_stream.py tests/neural_processes/test_scales.py tests/laws/test_processes.py tests/point_processes/test_cmhp.py tests/point_processes/test_base.py tests/point_processes/test_heads.py tests/point_processes/test_model.py --jaxtyping-packages=constmem,beartype.beartype

check: $(VENV)/.dev  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev  ## measure again what a CPU can in minutes: nothing of a GPU, no table of trained models
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/complexity.py
	$(BIN)/python benchmarks/event_cost.py
	$(BIN)/python benchmarks/update.py
	$(BIN)/python benchmarks/numerics.py
	$(BIN)/python benchmarks/rounding.py
	$(BIN)/python benchmarks/diabetes.py
	$(BIN)/python benchmarks/bench.py --out benchmarks/results/bench.json

$(VENV)/.pip: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	touch $@

$(VENV)/.train: $(VENV)/.pip $(PROJECT)
	$(PIP) --editable ".[train]"
	touch $@

$(VENV)/.dev: $(VENV)/.train $(PROJECT)
	$(PIP) --editable ".[train,data]" --group dev
	touch $@

clean:
	rm -rf $(VENV) build dist
