# make demo       install, build an engine from a trained network, run it, show why each layer is sparse or dense
# make test       install, run all tests (GPU tests skip with the reason where there is no GPU)
# make check      the quick half of the tests
# make test-blas  the quick half again, on the BLAS of other processors: nothing may rest on the order of its sums
# make test-long  the exhaustive runs as well
# make registers  write anew what every kernel takes of an SM (tests/golden/registers.json)
# make bench      CPU-side benchmarks: emulator speed, planner against its rivals
# make gpu        on a machine with a GPU: hardware tests, then benchmarks; installs nothing, uses $(PYTHON) as it is
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PARALLEL := -n auto --dist loadgroup

.PHONY: demo test check test-blas test-long registers bench gpu clean

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not long" --durations=15

check: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not long and not slow"

test-blas: $(STAMP)
	OPENBLAS_CORETYPE=Nehalem $(BIN)/python -m pytest $(PARALLEL) -m "not long and not slow"
	if grep -qm1 avx2 /proc/cpuinfo; then OPENBLAS_CORETYPE=Haswell $(BIN)/python -m pytest $(PARALLEL) -m "not long and not slow"; fi

test-long: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) --durations=30

registers: $(STAMP)
	rm -f out/registers.txt && mkdir -p out
	GPU_RUNTIME_RECORD=$(CURDIR)/out/registers.txt $(BIN)/python -m pytest $(PARALLEL) -m "not long" -k without_spills
	$(BIN)/python -m tests.registers out/registers.txt

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bench_emulator

gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu

$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf .venv build out *.egg-info
