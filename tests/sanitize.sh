#!/usr/bin/env bash
# sanitize.sh: runs the C tests, the examples, the kernels and the widest instruction set under AddressSanitizer, with
# leak detection. With GRADCODEC_TESTS=all also runs the Rust tests and the other instruction sets, and C tests and
# examples under valgrind, with the shipped library. Programs with a planted defect run first, and the sanitizer must
# report each: a run that finds nothing is no proof.
#
# Works in build/sanitize; the standard library is not rebuilt. The last line counts what passed.
set -uo pipefail
cd "$(dirname "$0")/.."

tier=${GRADCODEC_TESTS:-quick}
target=x86_64-unknown-linux-gnu
work=$PWD/build/sanitize
asan=$work/$target/fast
mkdir -p "$work/asan" "$work/plain" "$work/logs"

passed=0 failed=0 skipped=0

# step NAME COMMAND...: runs a command, and prints its output if it fails
step() {
    local name=$1 log=$work/logs/${1//[^a-zA-Z0-9]/_}
    shift
    if "$@" >"$log" 2>&1; then
        echo "ok      $name"
        passed=$((passed + 1))
    else
        echo "FAILED  $name: $*"
        tail -n 60 "$log"
        failed=$((failed + 1))
        false
    fi
}

skip() { # WHAT WHY
    echo "SKIPPED $1: $2"
    skipped=$((skipped + 1))
}

finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    exit $((failed > 0))
}

# compile SOURCE PROGRAM LIBRARY_FOLDER FLAGS...: programs that use the loader are not linked with the library
compile() {
    local source=$1 program=$2 folder=$3
    shift 3
    ${CC:-cc} -std=c99 -O1 -g -Wall -Wextra -pedantic -Werror "$@" -Iinclude "$source" -o "$program" \
        -L"$folder" -Wl,--as-needed -lgradcodec -Wl,-rpath,"$folder" -pthread -lm -ldl
}

declare -A argument=([digits]=examples_c/data/digits.bin) # of a program
# dies_of WORDS WHERE COMMAND...: checks that the command fails with a report that has WORDS and the function WHERE
dies_of() {
    local words=$1 where=$2 report
    shift 2
    report=$("$@" 2>&1) && { echo "$* passes"; return 1; }
    echo "$report"
    grep -q "$words" <<<"$report" && grep -q "$where" <<<"$report"
}

# Programs of every round. Left out: huge, which takes 9 GiB; stack, because a sanitizer uses more stack; environment,
# because valgrind does not model floating-point environments; mpi, which needs an MPI.
programs=()
for source in tests/c/*.c examples_c/*.c; do
    case $source in
    tests/c/huge.c | tests/c/stack.c | tests/c/environment.c | examples_c/mpi.c) ;;
    *) programs+=("$source") ;;
    esac
done

export GRADCODEC_STAND_INS=$work/stand_ins
mkdir -p "$GRADCODEC_STAND_INS"
for source in tests/fakes/python/*.c; do
    step "compile $source" ${CC:-cc} -std=c99 -g -shared -fPIC "$source" \
        -o "$GRADCODEC_STAND_INS/$(basename "$source" .c).so"
done

# ---- AddressSanitizer ----

if [ "$(uname -m)" != x86_64 ]; then
    skip "AddressSanitizer" "this script knows x86-64 only"
    finish
fi

# A failed allocation returns NULL, as without the sanitizer. gcc's runtime serves both the library and the programs:
# rustc links its own into executables only, never into a shared library.
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 RUSTC_BOOTSTRAP=1
instrumented=(env RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR="$work")
step "build the library" "${instrumented[@]}" cargo build --profile fast --locked --lib --target $target || finish
ln -sf libgradcodec.so "$asan/libgradcodec.so.0"
export GRADCODEC_LIBRARY=$asan/libgradcodec.so.0

# Planted defect: a tensor that claims twice its memory.
cat >"$work/overflow.c" <<'EOF'
#include <gradcodec.h>
#include <stdlib.h>
int main(void) {
    int64_t shape[1] = {64}, rows[2] = {1, 8};
    DLTensor src = {malloc(32), {kDLCPU, 0}, 1, {kDLBool, 8, 1}, shape, NULL, 0};
    DLTensor dst = {malloc(8), {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, rows, NULL, 0};
    gc_status_t status = gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL);
    free(src.data);
    free(dst.data);
    return status;
}
EOF
# Planted defect: leaked tensors. Several, because the last address may still be on the stack or in a register.
cat >"$work/leak.c" <<'EOF'
#include <gradcodec.h>
int main(void) {
    int64_t shape[1] = {1000};
    DLDevice cpu = {kDLCPU, 0};
    DLDataType boolean = {kDLBool, 8, 1};
    DLManagedTensor *tensor;
    gc_status_t status = 0;
    for (int k = 0; k < 10; k++)
        status |= gc_tensor_empty(cpu, boolean, 1, shape, &tensor);
    tensor = 0;
    return status;
}
EOF
# Work for several threads, which still exist when the program ends.
cat >"$work/pool.c" <<'EOF'
#include <gradcodec.h>
#include <stdlib.h>
enum { ELEMENTS = 32 << 20 };
int main(void) {
    int64_t shape[1] = {ELEMENTS}, rows[2] = {1, ELEMENTS / 8};
    DLTensor src = {calloc(ELEMENTS, 1), {kDLCPU, 0}, 1, {kDLBool, 8, 1}, shape, NULL, 0};
    DLTensor dst = {malloc(ELEMENTS / 8), {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, rows, NULL, 0};
    gc_status_t status = gc_set_threads(4) | gc_pack_chunks_into(&src, GC_BIT_ORDER_BIG, &dst, NULL);
    free(src.data);
    free(dst.data);
    return status;
}
EOF
for name in overflow leak pool; do
    step "compile $name" compile "$work/$name.c" "$work/asan/$name" "$asan" -fsanitize=address -fno-omit-frame-pointer
done
# The instruction sets of this processor, the widest one last; all: every one, because masked loads must be checked, too.
sets=(portable)
for set in avx2 avx512; do
    if grep -qw "${set/avx512/avx512bw}" /proc/cpuinfo; then
        sets+=($set)
    else
        skip "$set" "this processor does not have it"
    fi
done
[ "$tier" = all ] || sets=("${sets[-1]}")
for set in "${sets[@]}"; do
    step "an overflow is found, $set" dies_of "heap-buffer-overflow" "gc_pack_chunks_into" \
        env "GRADCODEC_CPU=$set" "$work/asan/overflow"
done
step "threads at the end" "$work/asan/pool"
step "a leak is found" dies_of "LeakSanitizer: detected memory leaks" "gc_tensor_empty" "$work/asan/leak"

if [ "$tier" = all ]; then
    # Skips the test that uses up all memory, which would leave none for the sanitizer.
    step "the Rust tests" "${instrumented[@]}" cargo test --profile fast --locked --lib --test out_of_memory --test golden \
        --target $target -- --skip without_threads_the_caller_runs_all_parts
fi
for source in "${programs[@]}"; do
    name=$(basename "$source" .c)
    step "compile $source" \
        compile "$source" "$work/asan/$name" "$asan" -fsanitize=address -fno-omit-frame-pointer || continue
    # shellcheck disable=SC2086 # none, or one word
    step "$name" env LD_LIBRARY_PATH="$asan" "$work/asan/$name" ${argument[$name]:-}
done

# Runs the kernels lane by lane on a driver with allocations of exact size. The first program passes a gradient with
# fewer elements than its shape; the sanitizer must report it. Leak detection is off, because Python itself leaks.
cat >"$work/short.py" <<'EOF'
import driver
assert driver.device_count()  # initializes the driver
driver.use(driver.primary())  # before the library looks for a driver
import numpy as np
from arena import Arena
from capi import int64s
from codecs_c import Checked, call, views

place = Arena(exact=True)
with Checked(place, codec=5, segments=[100], error=None) as codec:
    gradient, payload = place.put(np.ones(97, "f4")), place.put(np.zeros((1, codec.model.stride), np.uint8))
    gradient.struct.dl_tensor.shape = int64s((100,))
    call("gc_codec_encode", codec.handle, views([gradient]), 1, None, None, payload.view, None)
EOF
if [ -x build/venv/bin/python ]; then
    mkdir -p "$work/driver"
    step "compile the kernels" ${CXX:-g++} -std=c++17 -O1 -g -fPIC -ffp-contract=off -Wno-unknown-pragmas -Iinclude \
        -fsanitize=address -c tests/fakes/cuda/kernels.cpp -o "$work/kernels.o"
    step "compile the stand-in driver" ${CC:-cc} -std=c11 -D_GNU_SOURCE -DEXACT -O2 -g -fsanitize=address -shared -fPIC \
        -Wl,-soname,libcuda.so.1 tests/fakes/cuda/libcuda.c "$work/kernels.o" -lstdc++ -o "$work/driver/libcuda.so.1"
    on_driver=(env GRADCODEC_TESTS=quick GRADCODEC_DRIVERS="$work" LD_LIBRARY_PATH="$work/driver"
        PYTHONPATH=tests/spec:tests/python ASAN_OPTIONS="$ASAN_OPTIONS:detect_leaks=0"
        LD_PRELOAD="$(${CC:-cc} -print-file-name=libasan.so)" build/venv/bin/python)
    step "a kernel that reads too far is found" dies_of "heap-buffer-overflow" "blocks_encode" \
        "${on_driver[@]}" "$work/short.py"
    step "kernels of codecs" "${on_driver[@]}" -m pytest -q -p no:cacheprovider \
        tests/spec/test_codec.py -k "(block_codecs or random) and cuda"
    step "kernels of bits, signs and copies" "${on_driver[@]}" -m pytest -q -p no:cacheprovider \
        tests/spec/test_parity.py tests/spec/test_copies.py -k "any_layout or ((nothing_else or vote_signs) and cuda)"
    for set in "${sets[@]}"; do
        step "bits and signs on the CPU, $set" env "GRADCODEC_CPU=$set" "${on_driver[@]}" -m pytest -q -p no:cacheprovider \
            tests/spec/test_parity.py -k "(nothing_else or vote_signs) and cpu"
        step "large results on the CPU, $set" env "GRADCODEC_CPU=$set" "${on_driver[@]}" -m pytest -q -p no:cacheprovider \
            tests/python/test_bits.py -k "workers or caches"
        step "copies on the CPU, $set" env "GRADCODEC_CPU=$set" "${on_driver[@]}" -m pytest -q -p no:cacheprovider \
            tests/python/test_copy.py -k nowhere_else
    done
else
    skip "kernels of codecs" "no build/venv: make test-python makes it"
fi

[ "$tier" = all ] || finish

# ---- valgrind ----

if ! command -v valgrind >/dev/null; then
    skip valgrind "not installed"
    finish
fi

unset RUSTC_BOOTSTRAP
step "build the library as it is shipped" cargo build --locked --release || finish
cp target/release/libgradcodec.so "$work/plain/libgradcodec.so.0"
ln -sf libgradcodec.so.0 "$work/plain/libgradcodec.so"
export GRADCODEC_LIBRARY=$work/plain/libgradcodec.so.0

# The library's threads, and glibc's memory of a thread, live until the process ends. Only a pointer into the middle of
# that memory remains, which valgrind calls possibly lost. Nothing else is suppressed.
cat >"$work/valgrind.supp" <<'EOF'
{
   thread-local storage of threads that are still there at the end
   Memcheck:Leak
   match-leak-kinds: possible
   fun:calloc
   ...
   fun:_dl_allocate_tls
   fun:allocate_stack
   fun:pthread_create*
}
EOF
# Valgrind runs one thread at a time. Without fair scheduling a thread may starve the others, and fork.c times out.
memcheck=(valgrind --quiet --fair-sched=yes --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect,possible
    --errors-for-leak-kinds=definite,indirect,possible --suppressions="$work/valgrind.supp" --num-callers=30)

step "compile overflow, plain" compile "$work/overflow.c" "$work/plain/overflow" "$work/plain"
step "compile pool, plain" compile "$work/pool.c" "$work/plain/pool" "$work/plain"
step "compile leak, plain" compile "$work/leak.c" "$work/plain/leak" "$work/plain"
step "an overflow is found, valgrind" dies_of "Invalid read" "gc_pack_chunks_into" \
    "${memcheck[@]}" "$work/plain/overflow"
step "a leak is found, valgrind" dies_of "definitely lost" "gc_tensor_empty" "${memcheck[@]}" "$work/plain/leak"
step "threads at the end, valgrind" "${memcheck[@]}" "$work/plain/pool"
for source in "${programs[@]}"; do
    name=$(basename "$source" .c)
    # These train networks: minutes on an emulated processor, and no calls that other programs lack.
    case $name in digits | feedback) continue ;; esac
    step "compile $source, plain" compile "$source" "$work/plain/$name" "$work/plain" || continue
    # shellcheck disable=SC2086 # none, or one word
    step "$name, valgrind" "${memcheck[@]}" "$work/plain/$name" ${argument[$name]:-}
done
finish
