PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROJECT := pyproject.toml constraints.txt
# Files in the order of their names: those with the most tests are not the longest, and the last ones are short.
# The plugin of schemathesis is loaded, at two seconds a process, and not used.
HALVES := -n 2 --dist loadfile --no-loadscope-reorder -p no:schemathesis
QUICK := not slow and not gpu and not wheel and not attack
# What the pass with shapes adds: every verb of every model, states and their algebra, layers and streams. Files,
# published figures and old weights go through the same functions once more.
SHAPED := tests/laws/test_losses.py tests/laws/test_processes.py tests/laws/test_states.py \
	tests/core/test_arguments.py tests/core/test_block.py tests/core/test_fold.py tests/core/test_model.py \
	tests/core/test_moments.py tests/core/test_state.py tests/core/test_values.py tests/point_processes \
	tests/neural_processes tests/streams/test_pool.py tests/streams/test_stream.py \
	--ignore=tests/neural_processes/test_published.py --ignore=tests/neural_processes/test_older_weights.py \
	--ignore=tests/point_processes/test_published_events.py

.PHONY: demo test check docs slow-test attack store-attack bench wheel-test clean

demo: $(VENV)/.train  ## learn a power plant's rows as a stream, beside a forest; complete digits; draw both
	$(BIN)/constmem demo

test: $(VENV)/.dev  ## the tests, then once more with every shape annotation checked at run time
	$(BIN)/python -m pytest $(HALVES) -m "$(QUICK)" $(ARGS)
	$(BIN)/python -m pytest $(HALVES) -q -m "$(QUICK) and not compiles and not data and not once" $(SHAPED) --jaxtyping-packages=constmem,beartype.beartype

check: $(VENV)/.dev  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs  ## the documentation site, in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs
	@echo "open build/docs/index.html"

attack: $(VENV)/.dev  ## damaged files, odd calls, kills, races and limits; lines broken on purpose, too
	$(BIN)/python -m pytest -m attack tests/attack --ignore=tests/attack/test_stores.py $(ARGS)
	$(BIN)/python benchmarks/attack.py
	$(BIN)/python benchmarks/tables.py

store-attack: $(VENV)/.dev  ## a thousand kills of store, consumers and service, and odd requests: twelve minutes
	$(BIN)/python -m pytest -m attack tests/attack/test_stores.py $(ARGS)
	$(BIN)/python benchmarks/store_kills.py
	$(BIN)/python benchmarks/tables.py

slow-test: $(VENV)/.docs  ## the GPU's kernels interpreted, ONNX and Ray, compiled losses of every model, the site: four minutes
	$(BIN)/python -m pytest $(HALVES) -m "slow and not gpu" $(ARGS)

wheel-test: $(VENV)/.dev  ## build wheel and sdist, install both in clean environments, run the demo there
	$(BIN)/python -m pytest -m wheel tests/test_packaging.py $(ARGS)

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

$(VENV)/.docs: $(VENV)/.dev $(PROJECT)
	$(PIP) --group docs
	touch $@

clean:
	rm -rf $(VENV) build dist
