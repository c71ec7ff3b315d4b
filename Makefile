# Every target sets up what it needs in .venv and is quick the second time.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# The same in every locale: torch's compiler reads its own files in that of the user.
export PYTHONUTF8 := 1
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test fuzz faults bench paper results docs linear cleaning fewshot wheel dist format clean

demo: .venv/.demo  ## tune an MLP on scikit-learn's digits with three methods, against fixed hyperparameters and random search
	$(BIN)/python -m applications.digits

test: .venv/.test  ## lint, types, tests and doctests; one of the tests builds the docs as `make docs` does
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

ROUNDS ?= 1
FACTOR ?= 20
TESTS ?= tests
fuzz: .venv/.test  ## property tests at random: ROUNDS=3, FACTOR=20 times the examples, SEED=1 repeats a round, TESTS=tests/test_hyper.py
	@status=0; for round in $$(seq $(ROUNDS)); do \
		seed=$(or $(SEED),$$($(BIN)/python -c "import secrets; print(secrets.randbelow(2**32))")); \
		echo "Round $$round of $(ROUNDS), seed $$seed"; \
		$(BIN)/python -m pytest --fuzz=$(FACTOR) --hypothesis-seed=$$seed --timeout=3600 $(TESTS) || status=1; \
	done; exit $$status

FAULTS ?= tests/faults
faults: .venv/.test  ## kills, signals, damaged and hostile files, full disks, NaN: the long form; figures go to docs/results/faults.txt
	FAULTS=long $(BIN)/python -m pytest --timeout=7200 -m "slow or not slow" $(FAULTS)

bench: .venv/.test  ## measure what is kept as numbers, and compare with the last record; ARGS="--keep" makes it the new one
	$(BIN)/python benchmarks/record.py $(ARGS)

paper: .venv/.test  ## the paper's experiments that are not in docs/results yet, hours: DATA=folder, ARGS="--only mnist"
	$(BIN)/python benchmarks/paper.py --data $(DATA) $(ARGS)

results: .venv/.test  ## tables and figures of the paper's experiments, from the files in docs/results; with DATA=folder, linear models too
	$(BIN)/python benchmarks/paper.py --tables $(if $(DATA),--data $(DATA))

docs: .venv/.test  ## the HTML pages in docs/_build/html; runs those tutorials that have changed
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs docs/_build/html

linear: .venv/.demo  ## the paper's linear models against their exact optimum; ARGS="--problem linear_network", for example
	$(BIN)/python -m applications linear $(if $(DATA),--data $(DATA)) $(ARGS)

cleaning: .venv/.demo  ## learn which training examples have wrong labels, on digits or on the MNIST files in DATA
	$(BIN)/python -m applications.cleaning $(if $(DATA),--data $(DATA))

fewshot: .venv/.demo  ## meta-learn an initialisation for sine curves: MAML, iMAML and baselines
	$(BIN)/python -m applications.fewshot

wheel: .venv/bin/python  ## wheel and sdist in dist/
	$(PIP) build
	rm -rf dist
	$(BIN)/python -m build --outdir dist

dist: wheel  ## the same, and the README's code in a clean environment without this clone
	rm -rf .venv-dist && $(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd / && "$(CURDIR)/.venv-dist/bin/python" "$(CURDIR)/tests/try_wheel.py" "$(CURDIR)/README.md"
	rm -rf .venv-dist

format: .venv/.test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-dist dist docs/_build docs/gallery .hypothesis .pytest_cache .mypy_cache .ruff_cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

# torch comes first, alone: a later range then finds it installed and fetches nothing else.
.venv/.torch: constraints.txt | .venv/bin/python
	$(PIP) "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	@touch $@

.venv/.demo: pyproject.toml .venv/.torch
	$(PIP) --editable ".[applications,plot]"
	@touch $@

.venv/.test: pyproject.toml .venv/.torch
	$(PIP) --editable ".[applications,docs,plot,test]"
	@touch $@
