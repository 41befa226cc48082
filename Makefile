# Every target sets up all it needs in a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
COMPARING := tests/sample_data tests/goldens tests/trainers tests/rules tests/views tests/recorders tests/evaluation/test_shared_evaluation.py \
	tests/evaluation/test_float32.py tests/parity/test_radii.py
NUMBERS := tests/goldens tests/trainers tests/formulas tests/evaluation tests/parity/test_radii.py tests/rules tests/sample_data tests/audit
EVERY ?= 18
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: calibrate demo docs drift dynamics gallery goldens gradients images labelled test test-slow test-portable test-lowest test-random-order parity lint types bench samples rule clean

demo: $(VENV)/.core
	@echo "A real TRL run:"
	@$(BIN)/rolloutdoctor check sample_data/run.parquet --fail-on never
	@echo "\nThree more runs, one line a rule:"
	@for run in verl_rejected slime_ppo healthy; do \
		echo "\n$$run"; $(BIN)/rolloutdoctor check sample_data/$$run.parquet --format concise --fail-on never; done

# Four minutes at most on two quiet cores: laws, stored results of the real functions, rules, hostile input, commands.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

# What takes seconds each, the real packages above all, Ray and a browser: the rest of the families of which `test` runs
# the first test, and the first that covers each value of an option.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m slow

# The whole suite as other processors would run it: torch's, numpy's and MKL's instructions at their lowest, at AVX2,
# and as they are here.
test-portable: $(VENV)/.dev
	@for level in lowest avx2 native; do $(BIN)/python tests/portable.py $$level -n 2 || exit 1; done

# What of them compares with logs and stored numbers: the fast tests, and every case of the families that say `lowest`.
test-lowest: $(VENV)/.dev
	$(BIN)/python tests/portable.py lowest -n 2 -q -m "not slow or slow(lowest=True)" $(COMPARING)

# Numbers and verdicts, as any library would add them up: the terms of every sum in a random order. The first of every
# 18 tests of each file, three minutes of CPU; EVERY=1 runs them all.
test-random-order: $(VENV)/.dev
	$(BIN)/python tests/portable.py random-order -n 2 -q --every $(EVERY) $(NUMBERS)

parity: $(VENV)/.dev
	$(BIN)/python tests/proof/table.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tests/sizes.py

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python tests/lab/benchmarks/bench.py

# How often rules accuse clean runs, and how weak a fault they find: tests/lab/calibration/results.md.
calibrate: $(VENV)/.dev
	$(BIN)/python tests/lab/calibration/power.py

# Runs with a known fault and clean ones, made with the real trainers and kept in tests/lab/labelled/runs/, and what
# `check` says of each: tests/lab/labelled/results.md. Some 25 minutes the first time, five after that.
labelled: $(VENV)/.dev
	$(BIN)/python tests/lab/labelled --page --quiet

# Real trainings with planted dynamics and without, checked by their logs alone: tests/lab/dynamics/results.md. Some
# half an hour the first time.
dynamics: $(VENV)/.dev
	$(BIN)/python tests/lab/dynamics --page

# What the newest releases on the package index changed since the ones that were read: tests/lab/drift/results.md. Two
# minutes; it ends with 1 where there is a release that was not read. WHEELS=FOLDER compares the wheels of a folder.
drift: $(VENV)/.dev
	$(BIN)/python tests/lab/drift $(if $(WHEELS),--wheels $(WHEELS))

# Results of a trainer's own functions of a release, stored: TRAINER=unsloth ZOO=2026.10.9, or TRAINER=openrlhf
# RELEASE=0.11.2; from the index, or from the wheels of WHEELS=FOLDER.
goldens: $(VENV)/.dev
	$(BIN)/python tests/goldens/make.py $(TRAINER) $(or $(RELEASE),$(ZOO)) $(WHEELS)

# Gradients by log-probs, by logits and by parameters over tiny trainings: tests/lab/gradients/results.md. Some ten minutes
# the first time.
gradients: $(VENV)/.dev
	$(BIN)/python tests/lab/gradients --page

# The pages as a site in site/, links and all.
docs: $(VENV)/.dev
	$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

images: $(VENV)/.core
	$(BIN)/rolloutdoctor plot advantages sample_data/verl_rejected.parquet --fix rejected-rows -o docs/images/advantages.png
	$(BIN)/rolloutdoctor plot kl sample_data/slime_ppo.parquet -o docs/images/kl.png
	$(BIN)/rolloutdoctor plot audit sample_data/healthy.parquet --set scale_rewards=none -o docs/images/audit.png

# Broken trainings, their reports and pictures: docs/gallery.md. Two minutes.
gallery: $(VENV)/.dev
	$(BIN)/python tests/lab/gallery.py

# A new rule: its file, its test and its line in the table; see docs/contribute/rule.md.
rule: $(VENV)/.dev
	@$(BIN)/python tests/new_rule.py $(NAME) $(CODE)

samples: $(VENV)/.dev
	$(BIN)/python sample_data/make_run.py
	$(BIN)/python sample_data/make_verl_rejected.py
	$(BIN)/python sample_data/make_slime_ppo.py
	$(BIN)/python sample_data/make_healthy.py
	$(BIN)/python sample_data/make_verifier_dies.py

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
