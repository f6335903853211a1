# On a fresh machine with Python >= 3.11:  make demo, make serve, make test; without a GPU:  make demo CPU=1
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Of 16,000 files a fraction is ever imported: python compiles these when it first does.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: help demo serve docs test lint types imports unit lowest pages format clean

help:
	@echo "make demo    a synthetic catalogue of 100,000 items: prepare, train, recommend, report"
	@echo "             CPU=1 installs torch without CUDA: 0.2 GB instead of 5.5"
	@echo "make serve   the demo behind HTTP, with a page to try it on; trains it first if need be"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make test    lint, types, import direction, documentation, tests"
	@echo "make lowest  the tests with the oldest packages that pyproject.toml allows (torch 2.8: 5.5 GB)"
	@echo "make pages   the tests that need a browser (Chromium)"
	@echo "make format  let ruff format and fix"
	@echo "make clean   remove the virtual environment and everything made"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "sce needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time) ..."
	@$(if $(CPU),$(PIP) uv && $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --torch-backend cpu torch)
	@$(PIP) --constraint constraints.txt --editable '.[dev]'
	@touch $@

# Every command below is one to copy: they print themselves. With 2,048 items a bucket, the default, two epochs take
# 2.4 times as long to train as with 256, and NDCG@10 is 0.411 instead of 0.462.
demo: $(STAMP)
	@rm -rf demo && mkdir demo
	$(BIN)/sce synthesize --items 124000 --users 20000 --out demo/log.parquet --titles demo/titles.csv
	$(BIN)/sce prepare demo/log.parquet --titles demo/titles.csv --out demo/data
	@echo "# two short epochs for a CPU: small buckets and short histories; with a GPU leave these options out"
	$(BIN)/sce train demo/data --epochs 2 --batch-size 256 --learning-rate 3e-3 --model.max-length 50 --loss.bucket-size-y 256 --out demo/run
	$(BIN)/sce recommend demo/run -k 10 --out demo/recommendations.csv
	@head -4 demo/recommendations.csv
	$(BIN)/sce report demo/run
	$(BIN)/sce evaluate demo/run
	@echo "report: $(CURDIR)/demo/run/report.html"

demo/run/result.json:
	@$(MAKE) --no-print-directory demo

demo/export/export.json: demo/run/result.json
	$(BIN)/sce export demo/run --out demo/export --force

serve: $(STAMP) demo/export/export.json
	@(sleep 3; $(BIN)/python -m webbrowser -t http://localhost:8000 > /dev/null 2>&1 < /dev/null || true) &
	$(BIN)/sce serve demo/export --data demo/data

test: $(STAMP)
	@$(MAKE) --no-print-directory -j2 lint types imports docs $(VENV)/.examples
	@$(MAKE) --no-print-directory unit

lint: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .

types: $(STAMP)
	$(BIN)/mypy

imports: $(STAMP)
	$(BIN)/lint-imports --no-cache > .imports.log 2>&1 || { cat .imports.log; exit 1; }; rm -f .imports.log

# Warnings, broken links among them, are errors.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -E -a -b html -d build/doctrees docs build/site
	@echo "site: $(CURDIR)/build/site/index.html"

# What the extra names, without sce itself: installing that again would pull it from under the pages that are built meanwhile.
$(VENV)/.examples: $(STAMP)
	@$(PIP) --constraint constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["examples"])')
	@touch $@

unit: $(VENV)/.examples
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

lowest: $(STAMP)
	@$(PIP) uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python build/lowest
	$(BIN)/uv pip install --quiet --python build/lowest --resolution lowest-direct --editable '.[dev,examples]'
	SCE_BROWSER=none OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest -n 2 --dist worksteal

pages: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m browser tests

format: $(STAMP)
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
