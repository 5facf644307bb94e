# Everything runs in its own virtual environment; `make help` lists what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
# each process compiles all that it imports where this is set
export PYTHONDONTWRITEBYTECODE :=
# two workers with one thread each: small tensors gain nothing from threads
# each file's tests share what it sets up
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-slow test-long test-versions test-track test-oracles test-gpu house lint types format fashion-mnist vega katex bench bench-full fuzz fuzz-guided kills evidence-full docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: $(VENV)/.installed ## Run FedSDG and its baselines on real text, and draw the report (about three minutes)
	$(BIN)/fedtailor run quickstart

test: $(VENV)/.installed ## Run the tests
	$(PYTEST) -m "not slow and not long"

test-slow: $(VENV)/.installed ## Run the tests that take half a second or more
	$(PYTEST) -m slow

test-long: $(VENV)/.installed ## Run the tests that take minutes, and the rest of what is combined; do so before a release
	$(PYTEST) -m long

test-versions: ## Run the fast tests with the lowest and the newest versions of all dependencies
	$(PYTHON) requirements/versions.py

test-track: ## Test the experiment trackers offline, in an environment of their own
	$(PYTHON) -m venv .venv-track
	.venv-track/bin/python -m pip install -q -c constraints.txt -e ".[test,track]"
	.venv-track/bin/python -m pytest tests/trackers
	.venv-track/bin/python -m pytest tests/trackers/offline

test-oracles: ## Compare with TRL, Opacus and prv-accountant, in an environment of its own
	$(PYTHON) -m venv .venv-oracles
	.venv-oracles/bin/python -m pip install -q -c constraints.txt -e ".[test]" trl==1.16.0 opacus==1.6.0 prv-accountant==0.2.0
	OMP_NUM_THREADS=1 .venv-oracles/bin/python -m pytest tests/oracles

test-gpu: ## Compare a GPU's numbers with and without recorded kernels, and with a CPU's (PYTHON has all packages)
	CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} PYTHONPATH=src:. $(PYTHON) -m pytest -m gpu tests/gpu

house: $(VENV)/.installed ## Show the package's parts, their layers and circles of imports
	$(BIN)/python -m tests.imports

lint: $(VENV)/.installed ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed ## Check types
	$(BIN)/mypy

format: $(VENV)/.installed ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fashion-mnist: ## Fetch Fashion-MNIST from Debian's packages into the cache (needs apt-get)
	sh requirements/fashion-mnist.sh

vega: ## Fetch Vega, which draws the report's page, into the package (needs npm)
	sh requirements/vega.sh

katex: ## Fetch KaTeX, which draws the documentation's formulas, into docs/_static (needs npm)
	sh requirements/katex.sh

bench: $(VENV)/.installed ## Measure fedtailor beside bare loops and the libraries at hand (minutes)
	$(BIN)/python -m benchmarks.peers --rounds 3 --repeats 1 --scale 0.2 --out benchmarks/results/small

bench-full: $(VENV)/.installed ## Install other libraries and measure everything (an hour)
	$(BIN)/python -m benchmarks.peers --install

fuzz: $(VENV)/.installed ## Read 10,000 mutated inputs of each kind (an hour); FUZZ="--seconds 60" for a minute each
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz $(FUZZ)

fuzz-guided: $(VENV)/.installed ## Let atheris look for input that breaks what reads it, a minute for each kind
	$(BIN)/python -m pip install -q "atheris>=3,<4"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.guided_fuzz $(FUZZ)

kills: $(VENV)/.installed ## Kill runs 1,000 times at random moments, and go on with each (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.random_kills $(KILLS)

evidence-full: $(VENV)/.installed ## Run the map at full size on a GPU for eight minutes; the same command goes on
	$(BIN)/python -m evidence.run --manifest evidence/manifest-full.toml --within 8 $(EVIDENCE)

docs: $(VENV)/.installed ## Build the documentation into site/; open site/index.html
	$(BIN)/python docs/methods_index.py
	$(BIN)/python docs/method_pictures.py
	$(BIN)/python -m sphinx -q -E -W --keep-going docs site

clean: ## Remove the virtual environment and what tools left
	rm -rf $(VENV) .venv-track .venv-oracles build dist site docs/methods/families jupyter_execute *.egg-info src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/.installed: pyproject.toml constraints.txt requirements/data.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test]"
	$(BIN)/python -m pip install -q --no-deps -r requirements/data.txt
	@touch $@
