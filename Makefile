# make train       install everything and train a small model: ten minutes
# make train TEXT=book.txt            the same with your text, in runs/book
# make train TEXT=folder RUN=mine     the same with a folder, in runs/mine
# make test        the tests that a contributor waits for: five minutes
# make test-long   the slower tests: random walks over ranks, kills, fuzzing
# make test-cuda   tests on an emulated GPU: 20 minutes, 10 GB of packages
# make first-gpu-hour-dry-run         rehearse the benchmarks of an hour on GPUs
# make lint        style, types, shell scripts and the documentation site
# make docs        build the documentation site in .site/
# make picture     draw the picture of the README; needs Chromium
# make help        print this list
# Each of these, except make help, creates .venv and installs what it needs. PYTHON=python3.12 selects another interpreter.
# TEXT and RUN are read only from make's command line; if the environment has them, make train says that it ignores them.

PYTHON ?= python3
BIN := .venv/bin
QUICKSTART := runs/quickstart
# pip would compile 20,000 files on one core, which takes a minute; compileall uses all cores. It fails on a few files
# that are templates and not Python.
PIP := $(BIN)/python -m pip install --quiet --no-compile
COMPILE := $(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
export OMP_NUM_THREADS ?= 1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT ?= 300 # seconds that torchrun gives a stopping run to save
unexport PYTHONDONTWRITEBYTECODE # pytest's workers share compiled files

.SILENT: # recipes print what a user needs to know, and make does not echo them
.PHONY: help train environment text no-run test test-long test-cuda first-gpu-hour-dry-run lint docs picture install python-version

TORCHRUN = $(BIN)/python -m training.supervision.torchrun
# Other programs export variables with these common names for their own purposes.
OF_ENVIRONMENT := $(foreach name,TEXT RUN,$(if $(filter environment,$(origin $(name))),$(name)))
unexport $(OF_ENVIRONMENT)
OWN := $(filter command,$(origin TEXT))
AGAIN := 'import os, shlex; words = (f"{k}={shlex.quote(os.environ[k])}" for k in ("TEXT", "RUN") if os.environ.get(k)); \
  print("make train", *words)'

# A misspelled variable, such as text= or TXT=, would be ignored, and the command would train on the wrong text.
KNOWN := TEXT RUN PYTHON BIN QUICKSTART CUDA_VENV OLDEST_CUDA_VENV OMP_NUM_THREADS TORCH_ELASTIC_SHUTDOWN_TIMEOUT PIP_%
VARIABLES := $(foreach word,$(MAKEOVERRIDES),$(if $(findstring =,$(word)),$(firstword $(subst =, ,$(word)))))
ifneq ($(filter-out $(KNOWN),$(VARIABLES)),)
$(error $(filter-out $(KNOWN),$(VARIABLES)) is no variable of this Makefile; for your own text, write: make train TEXT=... RUN=...)
endif

train: environment $(if $(OWN),text,no-run) .venv/installed $(if $(OWN),,token_files/quickstart/manifest.json)
ifdef OWN
	set -eu; export LOCKSTEP_NEXT="$$($(BIN)/python -c $(AGAIN))"; $(NAME); \
	before=; [ ! -e "token_files/$$name" ] || before=yes; \
	$(BIN)/python prepare_data.py "$$TEXT" --tokenizer bytes --output "token_files/$$name" \
	  --validation-fraction 0.1 --split tail \
	  || { [ -z "$$before" ] || echo "make: to start in another directory: make train TEXT=... RUN=mine" >&2; exit 1; }; \
	$(TORCHRUN) train.py "runs/$$name" --like $(QUICKSTART) --set "dataset=token_files/$$name"; \
	$(BIN)/python evaluate.py sample "runs/$$name" --prompt "" --tokens 200
	$(NAME); $(call NEXT,runs/$$name,python train.py runs/larger --like runs/$$name --set n_layers=4)
else
	LOCKSTEP_NEXT="make train" $(TORCHRUN) train.py $(QUICKSTART)
	$(BIN)/python evaluate.py sample $(QUICKSTART) --prompt "def " --tokens 200
	$(call NEXT,$(QUICKSTART),make train TEXT=FILE_OR_FOLDER)
endif

# The name of the folders in runs/ and token_files/: RUN, or else the name of TEXT
NAME = name=$$(basename -- "$$(cd -- "$$TEXT" 2> /dev/null && pwd || echo "$$TEXT")"); name=$${RUN:-$${name%.*}}; \
  name=$$(printf %s "$$name" | tr -s '[:punct:][:space:]' -)
NEXT = printf '  %s\n' "" "source .venv/bin/activate, then:" \
  "python evaluate.py sample $(1) --prompt 'The '" "python report.py $(1)" "$(2)"

environment:
	$(foreach name,$(OF_ENVIRONMENT),echo "make: NOTE: the environment variable $(name) is ignored;" \
	  "to use it, run: make train $(name)=..." >&2;) :

no-run:
	[ -z "$(filter command,$(origin RUN))" ] || \
	  { echo "make: RUN names the run directory of your own text; pass the text as well: make train TEXT=... RUN=mine" >&2; exit 1; }

text:
	[ -n "$$TEXT" ] || { echo "make: TEXT is empty; name a file or a folder: make train TEXT=book.txt" >&2; exit 1; }
	[ -e "$$TEXT" ] || { echo "make: TEXT=$$TEXT: no such file or folder" >&2; exit 1; }
	$(NAME); [ -e "token_files/$$name" ] || [ ! -e "runs/$$name" ] || \
	  { echo "make: runs/$$name belongs to another run; choose a name: make train TEXT=... RUN=mine" >&2; exit 1; }

help:
	sed -n 's/^# make/make/p' $(firstword $(MAKEFILE_LIST))

picture: .venv/installed token_files/quickstart/manifest.json
	$(BIN)/python benchmarks/one_curve.py one-curve.html
	chromium --headless --no-sandbox --hide-scrollbars --window-size=800,960 --force-device-scale-factor=2 \
	  --screenshot=docs/images/one-curve.png "file://$(CURDIR)/one-curve.html"

test: .venv/installed-test
	$(BIN)/python -m pytest

TRACKERS = tensorboard==2.21.0 wandb==0.31.0 trackio==0.43.0

test-long: .venv/installed-test
	$(PIP) "lm_eval[hf]==0.4.13" "transformers[serving]==5.20.2" $(TRACKERS)
	$(BIN)/python -m pytest -m slow -n 3 # the compilers and ranks of these tests use both cores
	$(BIN)/python -m pytest -m long -n 0 -s

# Environments with torch's CUDA build: the pinned version and the oldest supported one. The variables can name other
# environments, which are used without installing anything. If pip is configured to prefer CPU wheels, override that
# (`make test-cuda PIP_FIND_LINKS= PIP_CONFIG_FILE=/dev/null`).
CUDA_VENV ?= .venv-cuda-2.13
OLDEST_CUDA_VENV ?= .venv-cuda-2.11
ON_EMULATED_GPUS = tests/fakegpu/run $(1)/bin/python -m pytest tests/cuda -n 2 --timeout 900 -m

test-cuda: $(patsubst %,%/installed,$(filter .venv-cuda-%,$(CUDA_VENV) $(OLDEST_CUDA_VENV)))
	$(call ON_EMULATED_GPUS,$(CUDA_VENV)) cuda
	$(call ON_EMULATED_GPUS,$(OLDEST_CUDA_VENV)) oldest_torch

first-gpu-hour-dry-run: $(patsubst %,%/installed,$(filter .venv-cuda-%,$(CUDA_VENV)))
	output="$$(mktemp -d)/gpu-hour-dry-run"; \
	FAKEGPU_COUNT=2 tests/fakegpu/run $(CUDA_VENV)/bin/python benchmarks/first_gpu_hour.py --dry-run \
	  --output "$$output" || { cat "$$output/page.md"; exit 1; }

# === excludes local versions such as 2.13.0+cpu
.venv-cuda-%/installed: requirements.txt requirements-test.txt tests/fakegpu/requirements.txt | python-version
	"$(PYTHON)" -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch===$*.0
	grep -v '^torch==' requirements.txt | $(@D)/bin/python -m pip install --quiet --requirement /dev/stdin \
	  --requirement tests/fakegpu/requirements.txt
	grep -E '^(pytest|hypothesis|beartype)' requirements-test.txt | \
	  $(@D)/bin/python -m pip install --quiet --requirement /dev/stdin
	touch $@

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/shellcheck setup_lambda.sh launch/*.sh launch/slurm.sbatch .ci/run tests/fakegpu/run
	$(BIN)/mkdocs build --strict

docs: .venv/installed-test
	$(BIN)/mkdocs build --strict

install: .venv/installed

token_files/quickstart/manifest.json: | .venv/installed
	$(BIN)/python prepare_data.py stdlib --tokenizer bytes --output token_files/quickstart \
	  --validation-fraction 0.03 --split tail

.venv/installed: requirements.txt | $(BIN)/python
	echo "Installing torch and other packages (1.5 GB, or 5 GB with CUDA); this takes 1 to 10 minutes without output"
	$(PIP) --requirement requirements.txt
	$(COMPILE)
	touch $@

# One pip command for both files is faster than two.
.venv/installed-test: requirements-test.txt requirements.txt | $(BIN)/python
	$(PIP) --requirement requirements-test.txt
	$(COMPILE)
	touch .venv/installed $@

$(BIN)/python: | python-version
	"$(PYTHON)" -m venv .venv

python-version:
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	  { echo "Python 3.10 or newer is missing: $(PYTHON) is $$({ "$(PYTHON)" --version || echo absent; } 2>/dev/null); \
	pass one with make PYTHON=..." >&2; exit 1; }
