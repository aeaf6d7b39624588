# Everything a fresh machine needs: Python 3.11, git, make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin

.PHONY: demo test null lint bench gpu clean install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(RUN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: install
	$(RUN)/atoll train examples/demo/job.yaml --cluster examples/demo/cluster.yaml

lint: install
	$(RUN)/ruff check atoll tests benchmarks
	$(RUN)/mypy
	$(RUN)/lint-imports

null: install
	$(RUN)/python -m pytest tests -m null -n 2

test: lint null
	$(RUN)/python -m pytest tests -m "not gpu and not null"

bench: install
	$(RUN)/python benchmarks/all.py

gpu: install
	$(RUN)/python -m pytest tests -m gpu

clean:
	rm -rf build runs
