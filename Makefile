# One environment for every target; a stamp file makes each step run once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv reads its own variable for local wheel folders; pip's is honoured too.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Without such a folder uv asks PyTorch's own index for the CPU build; `make setup UV_TORCH_BACKEND=auto` suits a GPU.
ifeq ($(UV_FIND_LINKS),)
export UV_TORCH_BACKEND ?= cpu
endif
# torch and transformers compiled anew in each process of a run are ten seconds in each.
export PYTHONDONTWRITEBYTECODE :=
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python

.PHONY: help setup demo demo-llm view-demo test test-slow test-all test-numeric gpu-check check vllm lock clean

help: ## show the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: $(VENV)/.runtime sandbox-ready ## make .venv with the pinned CPU set and see that a sandbox is there
	@test -n "$$VIRTUAL_ENV" || echo "agentrl is in $(BIN): . $(BIN)/activate"

$(VENV)/bin/uv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv==0.13.8

$(VENV)/.runtime: requirements/runtime.txt pyproject.toml | $(VENV)/bin/uv
	$(UV) -r requirements/runtime.txt
	$(UV) --no-deps -e .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.runtime
	$(UV) -r requirements/dev.txt
	@touch $@

adapters: $(VENV)/.adapters ## the packages of other people's environments, for the adapters' tests

$(VENV)/.adapters: requirements/adapters.txt requirements/bfcl.txt $(VENV)/.dev
	$(UV) -r requirements/adapters.txt
	$(UV) --no-deps -r requirements/bfcl.txt
	@touch $@

smollm2: $(VENV)/.smollm2 ## a real pretrained language model of 135 M parameters (93 MB), for make demo-llm and the tests marked smollm2

$(VENV)/.smollm2: requirements/smollm2.txt $(VENV)/.runtime
	$(UV) --no-deps -r requirements/smollm2.txt
	@touch $@

# Wheels that are unpacked and not installed: neither brings the packages that it depends on.
WHEELS := build/wheels
sglang-types: $(WHEELS)/sglang/.ready ## SGLang's own message types (39 MB, nothing of it runs), for the tests marked sglang

$(WHEELS)/sglang/.ready: requirements/sglang.txt | $(VENV)/bin/uv
	@rm -rf $(WHEELS)/sglang
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(WHEELS)/sglang -r requirements/sglang.txt
	@touch $@

.PHONY: adapters smollm2 sglang-types sandbox-ready
sandbox-ready:
	@bash requirements/sandbox.sh

demo: setup ## train the tiny coding agent on this machine, with a live view, a table and a plot
	$(BIN)/agentrl demo --overwrite $(ARGS)

demo-llm: setup $(VENV)/.smollm2 ## train a real pretrained language model on this machine
	$(BIN)/agentrl demo --real --out runs/demo-llm --overwrite $(ARGS)

# Smaller than the demo: it goes into the wheel.
view-demo: setup ## record anew the run that agentrl view --demo shows
	$(BIN)/agentrl train examples/tiny_coder.toml --out runs/recorded --overwrite $(ARGS) \
	  --set train.steps=24 --set buffer.groups_per_step=6 --set buffer.keep_steps=2 --set eval.every=8 --set eval.n_during=32 \
	  --set 'eval.sets=[{ name = "held_out", kwargs = { split = "held_out" }, n = 32 }]'
	$(BIN)/python -m agentrl.view.recorded_run runs/recorded

# Tests that share servers run on one worker: see tests/conftest.py.
WORKERS ?= 2
# A worker that dies ends the run: after a restart the rest of its tests may be waited for in vain.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart=0 --durations=10
test: setup $(VENV)/.dev ## the tests that take less than two seconds each
	$(PYTEST) -m "not medium and not slow" $(ARGS)

test-slow: setup $(VENV)/.dev ## the other tests: whole runs, above all
	$(PYTEST) -m "medium or slow" $(ARGS)

test-all: setup $(VENV)/.dev ## all tests at once, slow and long ones too: servers start once
	$(PYTEST) $(ARGS)

# The same numbers where sums have another order: with other vector instructions, threads and libraries' paths, as another
# CPU has them. What torch compiles is left out: it writes code with vector instructions whatever it is told, and that does
# not compile. oneDNN and MKL fall back where this CPU lacks what they are told; torch takes it at its word and dies of an
# illegal instruction, so its third setting is asked of the CPU.
NUMERIC_ALL := tests/learner/test_families.py tests/learner/test_optimizers.py tests/learner/test_head.py tests/learner/test_stems.py \
  tests/learner/test_observations.py tests/learner/test_critic.py tests/learner/test_ranks.py tests/learner/test_model.py \
  tests/learner/test_algorithm.py tests/learner/test_whole_episodes.py tests/learner/test_lora.py tests/learner/test_kept.py
NUMERIC_WHOLE := tests/run/test_training_server.py tests/run/test_training_equality.py tests/run/test_exporting.py \
  tests/blocks/test_blocks.py tests/vision/test_agreement.py tests/run/test_sft.py::test_it_trains_as_a_plain_loop_over_rows
NUMERIC := $(PYTEST) -m "not slow and not compiler"
test-numeric: setup $(VENV)/.dev ## the numeric tests as other CPUs would compute them, five minutes on two cores
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 OMP_NUM_THREADS=3 MKL_NUM_THREADS=3 \
	  $(NUMERIC) tests/algos $(NUMERIC_ALL) $(NUMERIC_WHOLE) $(ARGS)
	ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(NUMERIC) $(NUMERIC_WHOLE) $(ARGS)
	env $$(grep -qw avx512f /proc/cpuinfo && echo ATEN_CPU_CAPABILITY=avx512) ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 $(NUMERIC) $(NUMERIC_WHOLE) $(ARGS)

# `make setup UV_TORCH_BACKEND=auto` first: the pinned set has PyTorch's CPU build.
gpu-check: setup ## check what needs an NVIDIA GPU, at most 40 minutes; ARGS=--tiny runs the same cases on this CPU
	$(BIN)/python benchmarks/gpu.py $(ARGS)

# Their pins and those of the adapters exclude each other.
REMOTE := $(VENV)-remote
.PHONY: remote test-remote
remote: $(REMOTE)/.ready ## make .venv-remote with SWE-ReX and inspect_ai, for the tests marked remote

$(REMOTE)/.ready: requirements/remote.txt pyproject.toml | $(VENV)/bin/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(REMOTE)
	$(BIN)/uv pip install --quiet --python $(REMOTE)/bin/python -r requirements/remote.txt
	$(BIN)/uv pip install --quiet --python $(REMOTE)/bin/python --no-deps -e .
	@touch $@

# Only the files that name the marker are collected: to import all of the tests takes a minute. A library has a file,
# and so a worker, of its own.
test-remote: remote ## the tests marked remote, in .venv-remote
	AGENTRL_REQUIRE=remote $(REMOTE)/bin/python -m pytest -n $(WORKERS) --durations=10 -m remote \
	  $$(grep -rlF mark.remote tests --include='*.py') $(ARGS)

# Agent programs run as commands, in a box that sees these folders.
PROGRAMS := $(VENV)-programs
PYTHON_312 ?= 3.12
.PHONY: programs programs-all
programs: $(PROGRAMS)/.ready ## for the tests marked programs and cookbook: OpenAI Agents SDK, LangGraph, qwen-code; Tinker's cookbook

$(PROGRAMS)/.ready: requirements/programs.txt requirements/npm.sh | $(VENV)/bin/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(PROGRAMS)
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PROGRAMS)/bin/python -r requirements/programs.txt
	sh requirements/npm.sh $(PROGRAMS) @qwen-code/qwen-code@0.24.4
	@touch $@

programs-all: $(PROGRAMS)-all/.ready ## those of the tests marked programs_all too: Codex, OpenHands, Harbor; PYTHON_312=PATH of a Python 3.12

$(PROGRAMS)-all/.ready: requirements/programs-all.txt $(PROGRAMS)/.ready
	$(BIN)/uv venv --quiet --allow-existing --python $(PYTHON_312) $(PROGRAMS)-all
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(PROGRAMS)-all/bin/python -r requirements/programs-all.txt
	sh requirements/npm.sh $(PROGRAMS)-all @openai/codex@0.171.0
	@touch $@

check: setup $(VENV)/.adapters $(VENV)/.smollm2 ## ruff, pyright, import rules, docs snippets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --output-sync=target --jobs=2 types snippets

.PHONY: check-room
ROOM_FOLDER = $(if $(ROOM),$(wildcard agentrl/$(ROOM)/ $(ROOM)/agentrl_$(ROOM)/))
check-room: setup $(VENV)/.dev ## ruff, pyright and import rules for one room, in under a minute: make check-room ROOM=algos
	@test -n "$(ROOM_FOLDER)" || { echo "ROOM=$(ROOM) is none of: environments tools $(notdir $(patsubst %/,%,$(wildcard agentrl/[a-z]*/)))"; exit 2; }
	$(BIN)/ruff check $(ROOM_FOLDER) $(wildcard tests/$(ROOM))
	$(BIN)/ruff format --check $(ROOM_FOLDER) $(wildcard tests/$(ROOM))
	$(BIN)/pyright $(ROOM_FOLDER)
	$(BIN)/python -m pytest -q tests/test_imports.py -k "not fresh_interpreter"

.PHONY: types snippets
types: # each of the two keeps one core busy
	$(BIN)/pyright

snippets:
	$(BIN)/python -m pytest -q tests/test_imports.py tests/test_docs.py

# Whoever installs the extra `train` gets these packages. The GNU licences would bind what is built on top of us.
.PHONY: licences
licences: setup ## the licences of what a run installs, in build/licences.md; a GNU one fails
	@mkdir -p build
	$(BIN)/uv tool run --quiet pip-licenses==5.5.5 --python $(BIN)/python --format=markdown --order=license \
	  --partial-match --fail-on="GNU;GPL" --output-file=build/licences.md \
	  --packages $$(grep -oE '^[A-Za-z0-9_.-]+' requirements/runtime.txt)

# Of the pinned set and not of .venv, which holds the packages of the tests as well. The command checks its file by
# CycloneDX's schema; the count sees that no line of the set was passed over.
.PHONY: sbom
sbom: setup ## what the wheel with the extra `train` installs, as CycloneDX, in build/sbom.json
	@mkdir -p build
	$(BIN)/uv tool run --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements requirements/runtime.txt \
	  --pyproject pyproject.toml --output-reproducible --validate --output-file build/sbom.json
	@test $$(grep -c '"purl": "pkg:pypi/' build/sbom.json) -ge $$(grep -c == requirements/runtime.txt)

.PHONY: docs
docs: $(VENV)/.docs ## the documentation site, in build/site; a warning or a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@bash requirements/site.sh build/site

$(VENV)/.docs: requirements/docs.txt $(VENV)/.runtime
	$(UV) -r requirements/docs.txt
	@touch $@

vllm: $(VENV)-vllm/.ready ## make .venv-vllm with the CPU build of vLLM, for engine = "vllm" and the tests marked vllm

TEMPLATES := $(WHEELS)/templates
.PHONY: templates
templates: $(TEMPLATES)/.ready ## the chat templates that other packages hold, for the tests marked templates

# Packages are unpacked without what they depend on; of the last one only its templates are kept.
$(TEMPLATES)/.ready: requirements/templates.txt | $(VENV)/bin/uv
	@rm -rf $(TEMPLATES) && mkdir -p $(TEMPLATES)/llama.cpp
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(TEMPLATES)/packages \
	  $$(grep -v '^#\|^llama' requirements/templates.txt)
	$(BIN)/pip download --quiet --no-deps --no-binary :all: --dest $(TEMPLATES)/source $$(grep ^llama requirements/templates.txt)
	tar -xzf $(TEMPLATES)/source/*.tar.gz --strip-components=5 -C $(TEMPLATES)/llama.cpp \
	  --wildcards '*/vendor/llama.cpp/models/templates/*.jinja'
	@rm -rf $(TEMPLATES)/source
	@touch $@

$(VENV)-vllm/.ready: requirements/vllm.txt requirements/vllm-overrides.txt | $(VENV)/bin/uv
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)-vllm
	$(BIN)/uv pip install --quiet --python $(VENV)-vllm/bin/python --overrides requirements/vllm-overrides.txt -r requirements/vllm.txt
	@touch $@

SETS := $(patsubst %,requirements/%.txt,runtime dev adapters remote docs peers vllm programs programs-all)
COMPILE := $(BIN)/uv pip compile --quiet --no-header --no-emit-find-links --no-annotate
lock: $(VENV)/bin/uv ## compile the pinned sets again; the CPU build of torch is what they are resolved for
	@touch $(SETS) && sed -i 's/^torch==\([0-9.]*\)$$/torch==\1+cpu/' $(SETS)
	$(COMPILE) --extra train --extra compare pyproject.toml requirements/runtime.in -o requirements/runtime.txt
	$(COMPILE) --extra train --extra compare --extra dev pyproject.toml requirements/runtime.in -o requirements/dev.txt
	$(COMPILE) --extra train --extra compare --extra dev --extra adapters --extra tinker --extra tensorboard --extra wandb --extra mlflow --extra otel --extra parquet --extra prometheus --extra pandas --extra polars pyproject.toml requirements/runtime.in -o requirements/adapters.txt
	$(COMPILE) --extra train --extra dev --extra inspect --extra swe-rex pyproject.toml requirements/runtime.in \
	  -o requirements/remote.txt
	$(COMPILE) -c requirements/adapters.txt requirements/docs.in -o requirements/docs.txt
	$(COMPILE) requirements/peers.in -o requirements/peers.txt
	$(COMPILE) requirements/programs.in -o requirements/programs.txt
	$(COMPILE) --python-version 3.12 requirements/programs-all.in -o requirements/programs-all.txt
	$(COMPILE) --overrides requirements/vllm-overrides.txt requirements/vllm.in -o requirements/vllm.txt
	@sed -i 's/^torch==\([0-9.]*\)+cpu/torch==\1/' $(SETS)

# Peers of the benchmarks: TRL, which pins and patches much of what we use, and llama.cpp.
PEERS := $(VENV)-peers
.PHONY: peers
peers: $(PEERS)/.ready ## TRL and llama.cpp in .venv-peers, beside which benchmarks measure

$(PEERS)/.ready: requirements/peers.txt | $(VENV)/bin/uv
	$(PYTHON) -m venv $(PEERS)
	$(BIN)/uv pip install --quiet --python $(PEERS)/bin/python -r requirements/peers.txt
	@touch $@

clean: ## remove the environment and the caches
	rm -rf $(VENV) $(PEERS) $(VENV)-vllm $(REMOTE) $(PROGRAMS) $(PROGRAMS)-all build/wheels build/site .pytest_cache .ruff_cache .hypothesis
