# The contributor's table of contents. Each target does all its own set-up on a bare machine with
# Python 3.11 and make; as root it also installs the Debian packages it needs, else it names them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CORPUS := $(VENV)/.corpus
# What only the tests need: a browser for the dashboard, a PostgreSQL server, `ip` for test networks.
TEST_DEBS := chromium postgresql iproute2
# Azure's own emulator of Blob storage, where npm is there to install it; else its tests are skipped.
AZURITE := $(VENV)/azurite/node_modules/.bin/azurite-blob

export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test soak gpu lint fmt bench clean debs

help:
	@echo "make demo | test | lint | fmt | soak | gpu | bench NAME=… | install | clean"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || $(MAKE) --no-print-directory debs DEBS=python3-venv
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt -e '.[trainer,azure,ssh,postgres,blob,tensorboard,hf,dev]'
	@touch $@

# The text that `builtin:gpt` trains on; without a network the standard library's sources stand in.
$(CORPUS): $(INSTALLED)
	$(BIN)/python -m trainer.corpus
	@touch $@

$(AZURITE): $(INSTALLED)
	@if command -v npm >/dev/null; then \
	  npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3 >/dev/null; \
	else echo "No npm here: what needs azurite is skipped."; fi

# Install $(DEBS) when root and something is missing; else say which.
debs:
	@missing=$$(for d in $(DEBS); do dpkg -s $$d >/dev/null 2>&1 || echo $$d; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Debian packages:" $$missing; \
	  apt-get -qq update >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends $$missing >/dev/null; \
	else \
	  echo "These Debian packages are needed; run: sudo apt-get install -y" $$missing; exit 1; \
	fi

demo: install $(CORPUS)
	$(BIN)/varuna demo $(ARGS)

test: install $(CORPUS) $(AZURITE)
	@$(MAKE) --no-print-directory debs DEBS="$(TEST_DEBS)"
	VARUNA_AZURITE=$$(ls $(CURDIR)/$(AZURITE) 2>/dev/null) $(BIN)/pytest -q -m "not soak and not gpu" $(ARGS)

soak: install $(CORPUS)
	$(BIN)/pytest -q -m soak --timeout 3600 $(ARGS)

# On a machine with CUDA devices and a torch that is built for them; elsewhere it says what is missing.
gpu: install
	$(BIN)/pytest -q -m gpu $(ARGS)

bench: install $(CORPUS)
	$(BIN)/python -m tests.bench.$(NAME) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
