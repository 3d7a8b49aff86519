# make demo   build, calibrate the bundled model, inspect the artifact, generate with it
# make test   every test; make check: format, lints and documentation

CARGO ?= cargo
KVSMITH = target/release/kvsmith
DEMO = target/demo
PYTHON = target/python/bin/python

.PHONY: all demo test check setup golden clean results

all: setup
	$(CARGO) build --release --locked

# What a fresh machine with only Rust lacks; says what to install where it may not do so itself.
setup:
	@sh scripts/setup.sh

demo: all
	@sh scripts/demo.sh $(KVSMITH) $(DEMO)

test: setup $(PYTHON)
	$(CARGO) test --locked
	KVSMITH_PYTHON=$(abspath $(PYTHON)) $(CARGO) test --locked --test docs -- --ignored

# docs/results.md with its numbers and pictures; about 25 minutes on 2 cores.
results: all
	$(CARGO) run --release --locked --example results -- $(KVSMITH) target/results

check: setup
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --no-deps

# The Python of the test that reads an artifact as docs/artifact.md says.
$(PYTHON): scripts/python.sh scripts/requirements.txt
	@sh scripts/python.sh target/python

clean:
	$(CARGO) clean
