# Everything a developer or CI runs. `make demo` and `make test` need only Python >= 3.11 and make.
# PYTHON chooses the interpreter that makes .venv: make setup PYTHON=python3.12

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench tools ci test-fault test-fault-full soak lower-bounds wheel-smoke lock protos proto-baseline format clean
BIN := .venv/bin
DEMO_FLAGS ?=
BENCH_FLAGS ?=
MINUTES ?= 2
MEMBERS ?= 1

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-22s %s\n", $$1, $$2 }'

setup: ## Make .venv with everything for development, by exact versions and hashes
	@PYTHON="$(PYTHON)" sh scripts/setup.sh

demo: setup ## Parse the standard library with real workers, kill one, freeze one, and prove nothing was lost
	@$(BIN)/leasekeeper demo $(DEMO_FLAGS)

test: setup ## Run the test suites (LEASEKEEPER_REQUIRE=all: a left-out test is a failure)
	@sh scripts/run_tests.sh

check: setup ## Format, lint, types, import contracts, protos, architecture, docs
	@sh scripts/check.sh

bench: setup ## Measure throughput and latency against embedded etcd, one JSON object a line
	@$(BIN)/leasekeeper bench $(BENCH_FLAGS)

tools: ## Build etcd 3.6 and grpcurl into tools/bin (needs Go)
	@sh scripts/build_tools.sh

test-fault: setup ## Run every fault case once, with small counts (at most 12 min)
	@$(BIN)/python -m pytest tests/fault -q -n 2 --dist loadfile -m "not full"

test-fault-full: setup ## Run every fault case, also with the bank's own counts and durations
	@$(BIN)/python -m pytest tests/fault -q

soak: setup ## Random faults under load for MINUTES (2); SEED replays a run, MEMBERS=3 takes a cluster
	@$(BIN)/python -m tests.fault.soak --minutes "$(MINUTES)" --members "$(MEMBERS)" $(if $(SEED),--seed "$(SEED)")

ci: ## What CI runs, in this work tree
	@bash .ci/run

lower-bounds: setup ## Import the SDK with the lowest versions that pyproject.toml allows
	@sh scripts/lower_bounds.sh

wheel-smoke: setup ## Build the wheel, install it alone in a fresh environment, import the SDK from there
	@sh scripts/wheel_smoke.sh

protos: ## Generate proto/gen from the .proto files
	@$(BIN)/python scripts/gen_protos.py

proto-baseline: setup ## Make today's contract the one that `make check` compares with (at a release)
	@sh scripts/contract.sh baseline

lock: setup ## Write constraints.txt anew from pyproject.toml
	@sh scripts/lock.sh

format: setup ## Format and sort imports
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --fix --quiet .

clean: ## Remove .venv, caches and built tools
	rm -rf .venv .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist tools/bin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
