# make demo          install, build an engine from a trained network, run it, show why each layer is sparse or dense
# make test          install, run the tests: every kernel, network and check (GPU tests skip with the reason)
# make check         the quick half of `make test`, under 3 minutes
# make test-servers  NVIDIA Triton and Ray Serve run an engine in the emulator, each in a virtual environment of its own
# make lint          ruff (rules and format), mypy, the budget of lines
# make docs          the pages of docs/ as a site, in out/site; a warning is an error
# make gpu           on a machine with a GPU: its experiments by priority, in nine minutes; installs nothing, uses $(PYTHON) as it is
# make gpu-pack      without a GPU: compiles and plans into out/gpu all that `make gpu` loads
# make test-all      all that CI runs, but for the sites of others: test, test-full, -driver, -wheel, -servers, lint, docs
# The parts of test-all, and what is rarely needed, stand in CONTRIBUTING.md under "Tests".
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PARALLEL := -n auto --dist loadgroup
BY_FILE := -n auto --dist loadfile  # what the tests of a file build once for all of them is built by one process
ON_GPU = $$(grep -rlE --include='test_*.py' 'pytest\.mark\.(gpu|driver)' tests)  # the files that have such tests: not all are to be read
QUICK := "not slow and not full and not long and not driver and not wheel and not servers"

# Tests run on all cores already: threads of BLAS would wait for each other at full speed, for half of a build's CPU time.
check test test-full test-blas test-driver test-long: export OPENBLAS_NUM_THREADS := 1

.PHONY: help demo test check test-all test-full test-blas test-compiled test-driver test-wheel test-servers test-long lint docs truth compiled bench gpu gpu-pack clean

help:
	@sed -n 's/^# //p' $(MAKEFILE_LIST)

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	$(BIN)/python -c "from cuda_kernels.emulator import build; build.library()"  # once, not in each process
	$(BIN)/python -m pytest $(BY_FILE) -m "not full and not long and not driver and not wheel and not servers" --durations=15

check: $(STAMP)
	$(BIN)/python -m pytest $(BY_FILE) -m $(QUICK)

test-all: test test-full test-driver test-wheel test-servers lint docs

test-full: $(STAMP)
	$(BIN)/python -m pytest $(BY_FILE) -m "full and not long and not driver and not wheel and not servers" --durations=15

test-blas: $(STAMP)  # plans, weights and texts, compared bit for bit: kernels are judged with a tolerance
	OPENBLAS_CORETYPE=Nehalem $(BIN)/python -m pytest $(BY_FILE) -m $(QUICK) tests/networks tests/package tests/gpu_runtime tests/benchmarks

BASE ?= $(shell git rev-list -1 --before='24 hours ago' HEAD 2>/dev/null)
test-compiled: $(STAMP)
	GPU_RUNTIME_RECOMPILE=$(if $(ALL),all,$(shell git rev-parse HEAD):$(BASE)) $(BIN)/python -m pytest $(PARALLEL) -m "not long" -k without_spills

test-driver: $(STAMP)
	$(BIN)/python -m tests.emulated_driver python -m pytest $(ON_GPU) $(PARALLEL) -m "driver or (gpu and not full and not long)" --durations=15

test-wheel: $(STAMP)
	$(BIN)/python -m pytest -s -m "wheel and not long and not driver" tests/test_wheel.py --durations=5

test-servers: $(STAMP)
	$(BIN)/python -m pytest -s -m "servers and not wheel and not long and not driver" tests/servers --durations=5

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tests.size
	$(BIN)/python -m tests.size --history

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

truth: .venv/.truth

.venv/.truth: $(STAMP) tests/independent/packages.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[truth]'
	$(BIN)/python -m tests.independent.packages
	touch .venv/.truth

.venv/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch .venv/.docs

test-long: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "long and not driver" --durations=30
	$(BIN)/python -m tests.emulated_driver python -m pytest $(ON_GPU) $(PARALLEL) -m "gpu and not driver and (full or long)" --durations=30
	$(MAKE) test-compiled ALL=1

compiled: $(STAMP)
	rm -f out/compiled.txt && mkdir -p out
	GPU_RUNTIME_RECORD=$(CURDIR)/out/compiled.txt $(BIN)/python -m pytest $(PARALLEL) -m "not long" -k without_spills
	$(BIN)/python -m tests.compiled out/compiled.txt

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bench_emulator

gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu

gpu-pack: $(STAMP)
	$(BIN)/python -m benchmarks.experiments.pack

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf .venv build out *.egg-info
