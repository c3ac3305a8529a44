# make demo   everything from nothing: environment, build, a trained agent and its report
# make test   everything from nothing: environment, build, the tests
# make fuzz   random calls of the compiled engine under sanitizers, for FUZZ_SECONDS
# TORCH chooses the torch requirement, VENV the environment's folder, PYTHON the interpreter.

TORCH ?= torch
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
# in CI the kernels are compiled with the oldest supported Triton too
TRITON_36 := $(if $(CI),$(VENV)/triton36)
# and the adapters are tested with the functions of trainers that install on a cluster only
TRAINERS := $(if $(CI),$(VENV)/trainers)
SOURCES := pyproject.toml CMakeLists.txt $(shell find csrc kernels pyrlstats benchmarks -type f -not -path '*/__pycache__/*')

.PHONY: demo test lint bench fuzz clean

demo: $(VENV)/.package
	$(BIN)/pyrlstats demo

test: $(VENV)/.package $(TRITON_36) $(TRAINERS)
	$(PIP) --group test
	PYRLSTATS_TRITON_36=$(abspath $(TRITON_36)) PYRLSTATS_TRAINERS=$(abspath $(TRAINERS)) \
		$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/.package
	$(PIP) --group test --group lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(find csrc tests/emulated -type f)
	cd $(VENV) && bin/mypy --config-file $(CURDIR)/pyproject.toml -p pyrlstats
	cd $(VENV) && bin/python -m mypy.stubtest --mypy-config-file $(CURDIR)/pyproject.toml pyrlstats._core

bench: $(VENV)/.package
	$(PIP) --group test
	$(BIN)/pytest benchmarks --benchmark-enable --benchmark-only

FUZZ_SECONDS ?= 300
fuzz: $(VENV)/.package
	$(PIP) --group test --group fuzz
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tests/fuzz_cpp.py --seconds $(FUZZ_SECONDS)

# torch comes first, so that the user's choice is kept; then the package, as a user would install it
$(VENV)/.package: $(SOURCES)
	@echo "installing $(TORCH), then pyrlstats, into $(VENV): minutes, in which pip says nothing"
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)"
	$(PIP) ".[demo]"
	touch $@

$(VENV)/triton36: | $(VENV)/.package
	$(PIP) --no-deps --target $@ triton==3.6.0

$(VENV)/trainers: | $(VENV)/.package
	$(PIP) --no-deps --target $@ verl==0.9.1
	-$(PIP) --no-deps --target $@ openrlhf==0.11.2 # has wheels for Linux on x86-64 and Python 3.10 to 3.12 only

clean:
	rm -rf $(VENV) build dist
