# One command per chore, the same on a laptop and in CI. `make run` and `make test` do their own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready-cpu
KERNELS := kernels/crossfill_kernels/native
BUILT := $(KERNELS)/_build/stamp
CONFIG ?= deploy/demo.yaml

# One OpenMP thread a process: several processes share the cores here.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup run test test-quick check format bench soak gpu-check clean distclean

help:
	@echo "make run      set up, make the demo models, start two workers and the router (Ctrl-C stops all of it)"
	@echo "make test     set up, run every test; real SGLang workers included (about 30 minutes)"
	@echo "make check    format, lint, types, import directions, docs"
	@echo "make bench    measure the kernels, the router and a worker on this machine"
	@echo "make soak     thirty conversations on the demo pair under faults, and the pool (about 25 minutes)"
	@echo "make gpu-check  on a machine with a GPU: check and time every Triton kernel there"
	@echo "make setup    only the virtual environment (.venv) and the models (var/models)"
	@echo "make clean    remove what runs made; 'make distclean' removes .venv and var too"

$(READY): pyproject.toml deploy/setup.sh deploy/constraints-cpu.txt
	@PYTHON=$(PYTHON) bash deploy/setup.sh $(VENV) $(READY)

# Not worth stopping for: without a compiler slower code serves, and says so.
$(BUILT): $(READY) $(KERNELS)/CMakeLists.txt $(wildcard kernels/crossfill_kernels/*/*.cpp kernels/crossfill_kernels/*/*.h)
	@$(BIN)/python -m crossfill_kernels.native.build || true

setup: $(BUILT)
	@$(BIN)/crossfill models prepare --demo >/dev/null

# `up` makes the models that its file names.
run: $(BUILT)
	@exec $(BIN)/crossfill up $(CONFIG)

test: $(BUILT)
	$(BIN)/python -m pytest $(ARGS)

# Everything that starts no real worker.
test-quick: $(BUILT)
	$(BIN)/python -m pytest -m "not real" $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python deploy/check_docs.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python kernels/benchmarks/paged_attention.py
	$(BIN)/python kernels/benchmarks/block_mass.py
	$(BIN)/python kernels/benchmarks/select_blocks.py
	$(BIN)/python kernels/benchmarks/mix_mass.py
	$(BIN)/python kernels/benchmarks/guided_attention.py --flex
	$(BIN)/python kernels/benchmarks/guided_attention.py --model var/models/smollm2-135m-instruct
	$(BIN)/python kernels/benchmarks/pack_map.py
	$(BIN)/python kernels/benchmarks/map_attention.py
	$(BIN)/python kernels/benchmarks/rope_rerotate.py
	$(BIN)/python kernels/benchmarks/lowrank_factor.py
	$(BIN)/python kernels/benchmarks/anchor_distance.py
	$(BIN)/python kernels/benchmarks/lowrank_correct.py
	$(BIN)/python kernels/benchmarks/ridge_correct.py
	$(BIN)/python kernels/benchmarks/ridge_fit.py
	@mkdir -p var/bench
	$(BIN)/crossfill calibrate router --data tests/data/router_scores_gsm8k_200.jsonl --score small=small_correct \
	  --score large=large_correct --output var/bench/scorer.json
	$(BIN)/crossfill bench router --scorer-file var/bench/scorer.json
	$(BIN)/crossfill bench worker
	$(BIN)/crossfill bench store
	$(BIN)/crossfill bench reuse --quick

# What takes too long for every change: conversations on the demo pair under faults, and the block pool's users killed.
soak: setup
	CROSSFILL_SOAK=1 CROSSFILL_POOL_SOAK_S=600 $(BIN)/python -m pytest tests/e2e/test_reuse_under_fire.py \
	  tests/cache_store/pool/test_killed_at_random.py $(ARGS)

gpu-check: $(READY)
	$(BIN)/python kernels/benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf var/log var/run var/bench build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) var $(KERNELS)/_build*
