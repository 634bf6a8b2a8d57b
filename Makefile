PYTHON ?= python3.11
SUITE = $(PYTHON) e2e/tooling/suite.py
CHECK = $$($(PYTHON) e2e/tooling/envs.py check)
IN_CHECK = PATH="$(CHECK)/bin:$$PATH" PYTHONPATH="$(CURDIR)/operator:$(CURDIR)/connector:$(CURDIR)/connector/testkit:$(CURDIR)/e2e"
.DEFAULT_GOAL := help

##@ The two commands
demo: ## One HybridPDService on a real one-node cluster, tokens compared with a single engine
	$(IN_CHECK) python -m hybridpd_demo

test: ## What CI runs: make check, real vLLM and NIXL, fuzzing, failures and soak, the real cluster
	@$(SUITE) test

##@ Daily work
check: ## Lint, types, contracts, unit and property tests: no vLLM, no cluster, under a minute
	@$(SUITE) check

test-connector: ## The connector on real vLLM engines and real NIXL
	@$(SUITE) connector

test-matrix: ## The connector with every other feature of vLLM, on vLLM 0.30, 0.31 and 0.32
	@$(SUITE) matrix

chaos: ## Every row of the failure table and ten minutes of soak, on real engines (root)
	@$(SUITE) chaos

fuzz: ## Coverage-guided fuzzing of all decoders, SECONDS=60 for each
	@$$($(PYTHON) e2e/tooling/envs.py fuzz)/bin/python connector/fuzz/fuzz.py --seconds $(or $(SECONDS),60)

test-e2e: ## The operator on the real cluster (or on the one KUBECONFIG names)
	@$(SUITE) e2e

fmt: ## Format and fix what ruff can fix
	$(IN_CHECK) ruff format . && $(IN_CHECK) ruff check --fix .

bench: ## The connector's costs beside those of vLLM's own, without engines: about two minutes
	@failed=0; for program in transfer_costs connector_cpu table_build; do \
	  echo "# benchmarks/$$program.py"; \
	  PYTHONPATH="$(CURDIR)/operator:$(CURDIR)/connector:$(CURDIR)/connector/testkit" \
	    $$($(PYTHON) e2e/tooling/envs.py engine)/bin/python benchmarks/$$program.py \
	    || [ $$? -eq 2 ] || failed=1; \
	done; exit $$failed  # 2 is a missed goal, which the output names

##@ The cluster
cluster-up: ## Start the one-node cluster; prints the KUBECONFIG to export
	@$(IN_CHECK) python -m hybridpd_cluster up

cluster-down: ## Stop it and remove what it left on this machine; caches stay
	@$(IN_CHECK) python -m hybridpd_cluster down

help: ## This text
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo test check test-connector test-matrix chaos fuzz test-e2e fmt bench cluster-up cluster-down help
