# make demo   build, calibrate the bundled model, generate with it, time the methods, write a report
# make test   every test; make check: format, lints, documentation, and whether the fuzz targets compile
# make fuzz   random inputs to everything that is read, FUZZ_SECONDS=60 for each target (docs/dev/fuzzing.md)
# make real   fetch a real model and texts (150 MB) and check them against transformers (docs/dev/replication.md)
# make sweep       the best options of every method on development text; ONLY=quest,lfps searches for some methods alone
# make results     what the methods lose, and which claims of the papers hold, then all pages; `make results-long` measures
#                  one table (scripts/results.py lists them). FINAL=1: the final texts, once per version
# make study       whether calibration pays on that model; `make study-pays`, `-domains`, `-lengths`: one part
# make results-decode   tokens per second of whole models, with the losses at the same settings
# make pages       docs/results.md and every table and picture that is made from docs/results/*.json, without measuring anything
# make cluster-test   the scripts of docs/cluster.md on a Slurm that runs on this machine meanwhile; less than three minutes
# make static   a program that carries OpenBLAS inside (Linux; libgfortran-12-dev beside what `make demo` needs)
# make screenshots   docs/pictures/report-*.png, the report of the real model
# make launches   src/compute/cuda/launches, the Rust side of the kernels, from what kernels/*.cu declare
# make cuda   fetch a CUDA compiler (524 MB on disk) where there is none, for the kernels and their test

CARGO ?= cargo
RUSTC ?= rustc
KVSMITH = target/release/kvsmith
DEMO = target/demo
PYTHON = target/python/bin/python
REAL = target/real
LAB = $(REAL)/lab
# Methods that `make sweep` searches for; empty = all.
ONLY =
# For `make results-decode`: a Python with llama-cpp-python, and one with torch and transformers.
LLAMA =
TRANSFORMERS =
# The tables of `make results`, of which each has a document in docs/results. Of `make results-easy-4096` too.
TABLES = text long same claims questions-4096 questions-8192 wpq-bits wpq-center row-formats row-sums row-reads row-maps equal-time code-store index-search
REAL_PYTHON = $(REAL)/python/bin/python

.PHONY: all static demo test check fuzz setup vulkan chromium cuda launches golden clean results sweep pages real study screenshots gpu-kit gpu-check \
	cluster-test

# `kvsmith --version` tells the commit.
RELEASE = KVSMITH_COMMIT="$$(git rev-parse --short HEAD 2>/dev/null || echo unknown)" $(CARGO)

all: setup
	$(RELEASE) build --release --locked

# Only the C library and libgcc_s.so.1 are needed where this program runs.
static: setup
	$(RELEASE) build --release --locked $$(sh scripts/static_flags.sh)

# What a fresh machine with only Rust lacks; says what to install where it may not do so itself.
setup:
	@sh scripts/setup.sh

# A Vulkan driver for the tests of --device wgpu.
vulkan:
	@sh scripts/vulkan.sh

# A browser for the tests of reports.
chromium:
	@sh scripts/chromium.sh

demo: all
	@sh scripts/demo.sh $(KVSMITH) $(DEMO)

# A CUDA compiler, where there is none: the next build has the kernels in it, else they are compiled when the
# program runs.
cuda:
	@sh scripts/cuda.sh target/cuda

# After a change of a kernel's declaration; a build fails until then.
launches:
	@mkdir -p target
	$(RUSTC) --edition 2024 -o target/write_launches build/write_launches.rs
	target/write_launches

test: setup vulkan chromium target/python/complete
	@sh scripts/cuda.sh target/cuda || echo "note: no CUDA compiler: the tests that need one will be ignored" >&2
	$(CARGO) test --locked
	KVSMITH_PYTHON=$(abspath $(PYTHON)) $(CARGO) test --locked --test suite -- --ignored docs:: tasks::

# A real model in $(REAL)/model and texts in $(REAL)/text, checked; what is there is not fetched again.
real: all $(REAL)/python/complete
	@sh scripts/real.sh $(REAL)
	KVSMITH_REAL=$(abspath $(REAL)) KVSMITH_PYTHON=$(abspath $(REAL_PYTHON)) \
		$(CARGO) test --locked --test suite -- --ignored real::

# The best options of every method, on development text: docs/results/sweep.json. Each method is kept as it ends.
sweep: real
	$(REAL_PYTHON) scripts/sweep.py $(KVSMITH) $(REAL) docs/results/sweep.json $(if $(ONLY),--only $(ONLY))

# Every table, one after the other, and the pages. What is measured is not measured again by the same program.
ifdef FINAL
results: real
	$(REAL_PYTHON) scripts/results.py $(KVSMITH) $(REAL) --final
	$(MAKE) pages
else
results: $(TABLES:%=results-%)
	$(RELEASE) run --release --locked --example small -- $(KVSMITH) target/small
	$(MAKE) pages
endif

# One table of at most an hour on two cores: docs/results/NAME.json. TIMES=1: the times alone, for a build with the same losses.
results-equal-time: real
	$(REAL_PYTHON) benches/equal_time.py $(KVSMITH) $(REAL) $(if $(TIMES),--times)

# Tokens per second beside llama.cpp, at the settings whose losses are known: at most two hours, on an idle machine.
# LLAMA and TRANSFORMERS: what stands beside it.
results-decode: real
	$(REAL_PYTHON) benches/decode_peers.py $(KVSMITH) $(REAL) $(if $(LLAMA),--llama $(LLAMA)) $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS))
	$(MAKE) pages

# Decode steps with caches of each row format: some minutes, on an idle machine.
results-row-format-times: real
	$(REAL_PYTHON) benches/row_format_times.py $(KVSMITH)
	$(MAKE) pages

results-row-maps results-code-store results-index-search: results-%: real $(REAL)/python/faiss
	$(REAL_PYTHON) benches/$(subst -,_,$*).py $(KVSMITH) $(REAL)

results-%: real
	$(REAL_PYTHON) scripts/results.py $(KVSMITH) $(REAL) --only $*

# Whether calibration pays, on that model: docs/results/study-*.json.
study: study-pays study-domains study-lengths
	$(MAKE) pages

study-%: real
	$(REAL_PYTHON) scripts/study.py $(KVSMITH) $(REAL) --only $*

# The pages from the committed documents; `make test` checks that they are up to date.
pages: target/python/complete
	$(PYTHON) scripts/render.py

# The report of the real model, as pictures for the documentation; needs Chromium.
screenshots: real
	$(KVSMITH) calibrate --model $(REAL)/model --text $(REAL)/text/python-calib.txt --max-tokens 32K --uuid-tokens 8K --seq-len 8192 \
		-o $(LAB)/report.safetensors --overwrite
	$(KVSMITH) report $(LAB)/report.safetensors -o $(LAB)/report.html --overwrite
	@sh scripts/screenshots.sh $(LAB)/report.html
	$(REAL_PYTHON) scripts/picture_data.py $(LAB)/report.html

# What `make gpu-check` runs, in one folder for a machine without Rust.
gpu-kit: setup cuda
	@sh scripts/gpu_kit.sh target/gpu-kit

# Checks and measures on this machine's NVIDIA GPU, in less than nine minutes: target/gpu-kit/out/gpu.json.
gpu-check: gpu-kit
	@sh scripts/gpu_check.sh target/gpu-kit

# scripts/cluster on a real Slurm, which is skipped where there is none, and against the schemas of the oldest Kubernetes
# that will do and of a new one.
# It runs the program that the tests run.
cluster-test: setup target/kubernetes/complete
	$(CARGO) build --locked
	target/kubernetes/bin/kubernetes-validate --strict --quiet --kubernetes-version 1.29 scripts/cluster/kubernetes.yaml
	target/kubernetes/bin/kubernetes-validate --strict --quiet --kubernetes-version 1.37 scripts/cluster/kubernetes.yaml
	@sh scripts/cluster/setup.sh
	@sh scripts/cluster/test.sh target/debug/kvsmith target/cluster

check: setup
	$(CARGO) fmt --check
	$(CARGO) fmt --check --manifest-path fuzz/Cargo.toml
	$(CARGO) clippy --locked --all-targets -- -D warnings
	CARGO="$(CARGO)" sh scripts/features.sh
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps
	@command -v g++ >/dev/null || echo "note: without g++ the fuzz targets are not compiled" >&2
	! command -v g++ >/dev/null || $(CARGO) check --locked --manifest-path fuzz/Cargo.toml --target-dir target

fuzz: setup
	@sh scripts/fuzz.sh target/fuzz

# The Python of the tests that read an artifact as docs/reference/artifact.md says, and make tasks.
target/python/complete: scripts/python.sh scripts/requirements.txt
	@sh scripts/python.sh target/python scripts/requirements.txt

# The Python that checks scripts/cluster/kubernetes.yaml.
target/kubernetes/complete: scripts/python.sh scripts/cluster/requirements.txt
	@sh scripts/python.sh target/kubernetes scripts/cluster/requirements.txt

# The Python that makes the real model.
$(REAL)/python/complete: scripts/python.sh scripts/real-requirements.txt
	@sh scripts/python.sh $(REAL)/python scripts/real-requirements.txt

# k-means of two benchmarks.
$(REAL)/python/faiss: $(REAL)/python/complete
	$(REAL_PYTHON) -m pip install --quiet --disable-pip-version-check faiss-cpu==1.15.1
	touch $@

clean:
	$(CARGO) clean
