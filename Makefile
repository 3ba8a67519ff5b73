# Everything from nothing: Python and make are all that has to be there.
PYTHON ?= python3
VENV ?= .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
BIN := $(VENV)/bin
RECIPE := $(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/image_classification.py --config recipes/configs/demo.yaml

.PHONY: help demo install check lint types test test-faults test-cpus test-standin test-zoo test-peers test-triton \
	test-oldest test-newest test-all results results-run article site clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Python compiles a module when it is first imported: of 21,000 a run needs 4,000. Twice quiet: without warnings.
INSTALL := python -m pip install --quiet --quiet --no-compile

# The pip of older Pythons takes a minute longer to choose from long indices.
VENV_OF = $(PYTHON) -m venv $(@D) && $(@D)/bin/$(INSTALL) --upgrade pip

# torch comes first and by its exact version: what needs torch must not choose another build of it.
$(VENV)/.installed: CONSTRAINTS := constraints.txt
$(OLDEST)/.installed: CONSTRAINTS := constraints-oldest.txt
$(VENV)/.installed: EXTRAS := test,trl,lightning
$(OLDEST)/.installed: EXTRAS := test
$(VENV)/.installed: constraints.txt
$(OLDEST)/.installed: constraints-oldest.txt
$(VENV)/.installed $(OLDEST)/.installed: setup.cfg pyproject.toml
	$(VENV_OF)
	$(@D)/bin/$(INSTALL) $$(grep '^torch==' $(CONSTRAINTS))
	$(@D)/bin/$(INSTALL) --constraint $(CONSTRAINTS) --editable '.[$(EXTRAS)]'
	touch $@

# Without constraints: what a user gets today. `make clean` before it, if the environment is old. The last two are of
# processors that take videos, too.
$(NEWEST)/.installed: setup.cfg pyproject.toml
	$(VENV_OF)
	$(@D)/bin/$(INSTALL) --upgrade --upgrade-strategy eager --editable '.[test,trl,lightning,fp8]' \
		torchvision num2words
	touch $@

install: $(VENV)/.installed  ## make .venv with everything in it

demo: install  ## train a network on the CPU without checkpointing and in half the memory, and compare (a minute)
	$(RECIPE) --activation_checkpointing none --output_dir out/demo/baseline
	$(RECIPE) --activation_checkpointing budget --memory_budget_gib 0.025 --output_dir out/demo/budget
	$(BIN)/memsave compare out/demo --html out/demo/compare.html
	@echo "The curves, side by side:  out/demo/compare.html"
	@echo "Your images on your GPU:   README.md, 'Train'"

check: lint types test  ## what has to hold before a commit

lint: install  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy on the package
	$(BIN)/mypy

export OMP_NUM_THREADS ?= 1
export PYTHONDONTWRITEBYTECODE :=  # else each process that a test launches compiles the package anew
# A process a core and one more, up to four: each holds torch, and waits for its tests' ranks.
PROCESSES := $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES) --maxprocesses 4 --dist worksteal

test: install  ## the tests (20 minutes on 2 cores)
	$(PYTEST) --durations 40 --durations-min 5 -m 'not slow'

test-faults: install  ## 200 runs killed, 100 checkpoints damaged, 60 signals, crafted files, 500 command lines, launchers
	$(PYTEST) -m slow -k 'not by_itself' tests/training/checkpoints tests/recipes/test_fuzz.py tests/recipes/test_restarts.py

test-cpus: install  ## predictions and equality with the instructions of other processors (10 minutes)
	$(PYTEST) -m slow tests/test_kinds_of_cpu.py

# timm and diffusers are tried where they are installed. It goes on where an interrupted one ended (out/zoo.jsonl).
test-zoo: install  ## every architecture of transformers, timm and diffusers under four plans; writes docs/results/zoo.md (an hour)
	HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m zoo.matrix; status=$$?; \
		HF_HUB_OFFLINE=1 PYTHONPATH=tests $(BIN)/python -m zoo.heads || status=1; \
		PYTHONPATH=tests $(BIN)/python -m zoo.page; exit $$status

# Nothing is downloaded. A case that turns wrong fails; the page is written if none does.
test-peers: install  ## what other projects ask of checkpointing, under four plans; writes docs/results/peer_suites.md (10 minutes)
	HF_HUB_OFFLINE=1 PEERS=out/peers.json $(PYTEST) tests/peer_suites --ignore tests/peer_suites/test_page.py
	PYTHONPATH=tests $(BIN)/python -m peer_suites.page out/peers.json

OF_VERSIONS := tests/core/activations tests/core/costs tests/core/test_losses.py tests/core/host/test_host_state.py \
	tests/models tests/integrations/test_trainer.py tests/training/exact/test_global_batchnorm.py \
	tests/training/test_optimizers.py tests/recipes/test_verify.py tests/test_private_names.py
TRAININGS := tests/integrations tests/core/planner/test_ahead.py tests/tools/cli/test_cli_fit.py \
	tests/run/test_errors_page.py tests/run/test_wandb_online.py tests/training/launch/test_fp8.py tests/triton_kernels \
	$(patsubst %,tests/recipes/test_%.py,ddp_equals_accumulation resume topologies)

test-oldest: BIN := $(OLDEST)/bin
test-oldest: $(OLDEST)/.installed  ## what depends on versions, with the lowest that setup.cfg allows (6 minutes on 2 cores)
	$(PYTEST) -m 'not slow' $(OF_VERSIONS)

# Its pytest, and every process that the tests start, see CUDA devices: tests/standin/README.md, "Which tests".
ON_STANDIN = STANDIN=1 PYTHONPATH=$(CURDIR)/tests/standin/site $(PYTEST) -m 'not slow' --timeout 900
OF_DEVICES := tests/core/test_losses.py tests/core/planner/test_on_a_device.py \
	$(patsubst %,tests/models/test_%.py,flash_attention_3 varlen) \
	tests/core/activations/test_offload.py::test_on_an_accelerator tests/core/activations/test_tiles.py::test_on_a_gpu \
	$(patsubst %,tests/core/activations/test_compiled_%.py,documents loss) \
	$(patsubst %,tests/core/host/test_host_%.py,state step step_loops) \
	$(patsubst %,tests/core/costs/test_%.py,breakdown device_memory) \
	$(patsubst %,tests/integrations/test_%.py,lightning trainer trl) \
	$(patsubst %,tests/recipes/test_%.py,auto_micro_batch bitwise_topology global_batchnorm image_classification) \
	$(patsubst %,tests/recipes/test_%.py,language_modeling memory_budget not_finite observers packed_attention) \
	$(patsubst %,tests/recipes/test_%.py,predicted_host_state text_classification verify) tests/recipes/test_resume.py::test_every_recipe
test-standin: install  ## what goes other ways on a GPU, on a stand-in for CUDA; needs g++
	$(ON_STANDIN) tests/standin/test_device.py $(OF_DEVICES) -k 'not (refused or mistake or one_line or ranks or processes or 8bit)'
	STANDIN_DEVICES=2 $(ON_STANDIN) tests/integrations/test_ranks.py
	STANDIN_GIB=0.02 $(ON_STANDIN) tests/recipes/test_on_a_full_device.py
	$(PYTEST) -m slow tests/recipes/test_sequence_parallel_launched.py -k devices
	$(PYTEST) -m slow tests/standin/test_stand_in.py tests/test_platforms.py tests/recipes/test_on_a_stand_in.py \
		tests/benchmarks/test_mfu.py

test-newest: BIN := $(NEWEST)/bin
test-newest: $(NEWEST)/.installed  ## the same, the trainers and every recipe, with the newest that pip finds (7 GB, 16 minutes)
	$(PYTEST) -m 'not slow' $(OF_VERSIONS) $(TRAININGS)
	$(PYTEST) tests/data/test_image_text.py tests/recipes/test_image_text.py

# Cards are not needed: torch's build for CUDA compiles for them without a driver. The page is written if nothing fails.
test-triton: BIN := $(NEWEST)/bin
test-triton: PROCESSES := $(shell getconf _NPROCESSORS_ONLN)
test-triton: $(NEWEST)/.installed  ## layers, compiled for an A100 and an H100; writes docs/results/triton_kernels.md (11 minutes on 2 cores)
	HF_HUB_OFFLINE=1 TRITON_ROWS=out/triton_kernels $(PYTEST) tests/triton_kernels
	PYTHONPATH=tests $(BIN)/python -m triton_kernels.page out/triton_kernels

test-all: install  ## the slow ones too, and those of the oldest and the newest versions
	$(PYTEST)
	$(MAKE) test-oldest test-newest

results: install  ## docs/results/README.md and index.html from docs/results/rows, without training
	$(BIN)/python benchmarks/results_table.py page

# ONLY names the works (benchmarks/result_rows/works.py); BUSY=1 leaves the times out.
ONLY ?= gpt2
results-run: install  ## measure ONLY=gpt2 on this machine and add its rows
	$(BIN)/python benchmarks/results_table.py run $(ONLY) $(if $(BUSY),--without_times)
	$(MAKE) results

article: install  ## run docs/article.ipynb and keep what it prints (3 minutes)
	$(BIN)/python -m nbconvert --to notebook --execute --inplace --ExecutePreprocessor.coalesce_streams=True \
		--ExecutePreprocessor.record_timing=False docs/article.ipynb

# The variable silences what the theme prints about a later mkdocs, which it does not take.
site: install  ## the documentation with the API reference in out/site, which needs no server
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:  ## remove the environment and what runs wrote
	rm -rf $(VENV) $(OLDEST) $(NEWEST) out .pytest_cache .mypy_cache .ruff_cache
