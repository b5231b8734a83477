# make install   a virtual environment in .venv with the exact versions of constraints.txt
# make test      install what is missing, run the tests; the explorer's need Chromium
# make demo      train on the bundled digits and draw new ones, into runs/demo: about 4 minutes on two cores
# make docs      the documentation site, into site/; a broken link is an error
# make bench     a learning step of ours against einsum on this CPU, into docs/: about 5 minutes, on a quiet machine
# make report    the tables and plots of README.md and docs/ anew, from the numbers in docs/results
# make build     wheel and sdist into dist/, each installed by itself in a new environment and tried out
# make check     lint, formatting, types
# make format    rewrite the code in the house format

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# In the environment, not as an option, so that they bind the build of the package itself as well.
export PIP_CONSTRAINT       := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)

DEMO := runs/demo

.PHONY: install demo docs browser test bench report build check format clean

install: $(VENV)/.installed

# torch first and pinned: asked for without a version, it may bring gigabytes of GPU libraries.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "poecaps needs Python 3.10 or newer, but $(PYTHON) is $$($(PYTHON) -V); set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet torch
	$(PIP) install --quiet --editable '.[dev]'
	@touch $@

# The preset default with fewer epochs, so that it ends within five minutes on two cores.
demo: install
	rm -rf $(DEMO)
	$(BIN)/poecaps train --out $(DEMO) --autoencoder.epochs 3 --encoder.epochs 3 --decoder.epochs 1 --pixel-decoder.epochs 3

docs: install
	$(BIN)/python -m zensical build --clean --strict
	$(BIN)/python tools/check_site.py site

# Without Chromium the tests in a browser are skipped, and pytest says so; POECAPS_BROWSER=required makes them fail.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installs chromium, for the tests in a browser"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "there is no chromium; tests in a browser need it" >&2; fi

test: install browser
	$(BIN)/python -m pytest -q

bench: install
	$(BIN)/python -m benchmarks --device cpu --json docs/results/routing-cpu.json
	$(MAKE) report

# Drawn from the numbers alone, so that what was measured on another machine is drawn as well.
report: install
	@for each in docs/results/routing-*.json; do name=$$(basename $$each .json); \
	  $(BIN)/python -m benchmarks --read $$each --plot docs/images/$$name.png || exit 1; done
	$(BIN)/python -m benchmarks.report README.md docs/results.md docs/benchmarks.md

# The wheel is made from the sdist, as an installer would make it.
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
