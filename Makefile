# Every target sets up all it needs in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test parity lint types bench samples clean

demo: $(VENV)/.core
	@echo "A real TRL run:"
	@$(BIN)/rolloutdoctor check sample_data/run.parquet --exit-zero
	@echo "\nThree more runs, one line a rule:"
	@for run in verl_rejected slime_ppo healthy; do \
		echo "\n$$run"; $(BIN)/rolloutdoctor check sample_data/$$run.parquet --format concise --exit-zero; done

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2

parity: $(VENV)/.dev
	$(BIN)/python tests/proof/table.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python tests/benchmarks/bench.py

samples: $(VENV)/.dev
	$(BIN)/python sample_data/make_run.py
	$(BIN)/python sample_data/make_verl_rejected.py
	$(BIN)/python sample_data/make_slime_ppo.py
	$(BIN)/python sample_data/make_healthy.py

$(VENV)/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	@touch $@

# verl's own dependencies pull a serving stack; the parity tests only call its maths.
$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable '.[test,lint,parity,yaml,tensorboard]'
	$(PIP) --no-deps verl
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
