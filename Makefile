# make install   create a virtual environment in .venv with the exact versions of constraints.txt
# make test      install missing packages and run the tests, in TEST_PROCESSES=2 processes; those of the explorer need Chromium
# make test-neon install a cross compiler and QEMU (Debian) and test the C code on an emulated ARM CPU
# make test-api  send 200 generated requests to each operation of the explorer
# make faults    let a small training fail at every call to the file system: about 5 minutes
# make fuzz      alter valid files and use them, for SECONDS=600, from a random SEED that it prints
# make demo      train on the bundled digits and generate new ones, in runs/demo: 2 to 4 minutes on two cores
# make demo-energy  train a density on the bundled digits and draw from its energy, in runs/energy: 2 to 4 minutes on two cores
# make docs      build the documentation site in site/; a broken link is an error
# make bench     time a layer against einsum on this CPU, in docs/: about 10 minutes on an idle machine
# make report    regenerate the tables and plots of README.md and docs/ from the numbers in docs/results
# make attack    move sliders of the explorer while 1,000 connections attack it, SECONDS=20 for each of 4 parts
# make soak      train in two processes that fail at random, for MINUTES=10, from a random SEED that it prints
# make build     build wheel and sdist in dist/, and try out each of them in a new environment
# make check     lint, formatting, types
# make format    format the code

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# In the environment, not as options, so that they also apply to the build of the package itself.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

# Processes that share the files of tests, each with one thread.
TEST_PROCESSES ?= 2

DEMO        := runs/demo
DEMO_ENERGY := runs/energy

.PHONY: install demo demo-energy docs browser test test-neon test-api faults fuzz attack soak bench report build check format clean

install: $(VENV)/.installed

# torch first and pinned: without a version, it may bring gigabytes of GPU libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "poecaps needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@

# The preset default with fewer epochs, so that it takes less than five minutes on two cores.
demo: install
	rm -rf $(DEMO)
	$(BIN)/poecaps train --out $(DEMO) --autoencoder.epochs 3 --encoder.epochs 3 --decoder.epochs 1 --pixel-decoder.epochs 3

# The preset energy with a smaller density, so that it takes less than five minutes on two cores.
demo-energy: install
	rm -rf $(DEMO_ENERGY)
	$(BIN)/poecaps train --preset energy --out $(DEMO_ENERGY) --autoencoder.epochs 3 \
	  --model.density.experts 100 8 --model.density.base-components 192 \
	  --density.epochs 45 --density.levels 20 --density.chains 320 --encoder.epochs 0 --decoder.epochs 0 --pixel-decoder.epochs 0 --no-figures
	$(BIN)/poecaps generate $(DEMO_ENERGY) --domain model --tied

docs: install
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python tools/check_site.py site

# Without Chromium, pytest skips the tests in a browser; POECAPS_BROWSER=required makes them fail.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium for the tests in a browser"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "chromium is not installed; the tests in a browser need it" >&2; fi

test: install browser
	$(BIN)/python -m pytest -q --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-neon: install
	@command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	      gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static >/dev/null; \
	  else echo "install aarch64-linux-gnu-gcc and qemu-aarch64-static" >&2; fi
	POECAPS_NEON=required $(BIN)/python -m pytest -q tests/kernels/test_neon.py

test-api: install
	POECAPS_API_EXAMPLES=200 $(BIN)/python -m pytest -q tests/explorer/test_server.py -k schemathesis

faults: install
	$(BIN)/python -m tests.faults --steps 3

# Inputs that fail are written to tests/corpus, whose inputs the tests use again.
fuzz: install
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

attack: install
	$(BIN)/python -m benchmarks.explorer_attack mnist $(if $(SECONDS),--seconds $(SECONDS))

soak: install
	$(BIN)/python tools/soak.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

bench: install
	$(BIN)/python -m benchmarks --device cpu --json docs/results/routing-cpu.json
	$(BIN)/python -m benchmarks.passes --json docs/results/passes-cpu.json
	$(MAKE) report

# Only reads the numbers, so that measurements of other machines are included.
report: install
	@for each in docs/results/routing-*.json; do name=$$(basename $$each .json); \
	  $(BIN)/python -m benchmarks --read $$each --plot docs/images/$$name.png || exit 1; done
	$(BIN)/python -m benchmarks.report

# The wheel is built from the sdist, as an installer would do.
build: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/check_build.py dist

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) dist build site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
