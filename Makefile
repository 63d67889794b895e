# `make demo`: the whole story on a laptop. `make search TEXT='FOLDER/*.jsonl.gz' TRAIN=FILE DEV=FILE`: from raw text to an
# answer (docs/search.md). `make test`: the test suite. `make faults`: docs/faults.md.
# `make hosts`: docs/many-nodes.md, as root. `make docs`: the site. `make demo` installs requirements.lock into .venv; the
# others also install requirements-dev.lock there. `make .venv/ready` installs both and does nothing else.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo search test faults hosts docs format lint
demo: .venv/run-ready
	PATH=$(CURDIR)/$(BIN):$$PATH bash launch/demo.sh

search: .venv/ready
	PATH=$(CURDIR)/$(BIN):$$PATH bash launch/search_from_text.sh '$(TEXT)' '$(TRAIN)' '$(DEV)' $(FIELDS)

test: .venv/ready
	$(BIN)/python -m pytest

faults: .venv/ready
	$(BIN)/python -m pytest --faults=docs/faults.md

hosts: .venv/ready
	$(BIN)/python -m pytest -n0 --hosts=docs/many-nodes.md

docs: .venv/ready
	$(BIN)/mkdocs build --strict

format: .venv/ready
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

.venv/run-ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar on --requirement requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation --editable .
	touch $@

.venv/ready: .venv/run-ready requirements-dev.lock
	$(BIN)/python -m pip install --progress-bar on --requirement requirements-dev.lock
	touch $@
