#!/bin/sh
# Tests gradcodec/mpi.h with the MPI of PYTHON's wheels, or the machine's: as C99 and C++, with 1 and 4 processes; and
# the examples in C and, by mpi4py, Python. Prints SKIPPED without MPI. Usage: mpi.sh PYTHON CC LIBRARY_DIR WORK_DIR
set -eu
[ $# -eq 4 ] || { echo "usage: $0 PYTHON CC LIBRARY_DIR WORK_DIR" >&2; exit 2; }
cd "$(dirname "$0")/../../.."
python=$1 cc=$2 library=$(cd "$3" && pwd) work=$4
mkdir -p "$work"

bin=$($python -c 'import os, sys; print(os.path.dirname(sys.executable))')
[ -x "$bin/mpicc" ] || bin=$(dirname "$(command -v mpicc || echo none)")
[ -x "$bin/mpicc" ] || { echo "SKIPPED gradcodec/mpi.h: no mpicc, neither here nor for $python"; exit 0; }
# Open MPI starts for root, and more processes than processors, only with these variables. MPICH would spin while it
# waits and keep the processor from the process that it waits for.
export MPICH_CC="$cc" OMPI_CC="$cc" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export MPIR_CVAR_CH4_PROGRESS_THROTTLE=1

flags="-O2 -g -Wall -Wextra -pedantic -Werror -Iinclude"
# compile SOURCE PROGRAM FLAG...
compile() {
    source=$1 program=$2
    shift 2
    # shellcheck disable=SC2086 # the flags are words
    "$bin/mpicc" -std=c99 $flags "$@" "$source" -o "$program" -L"$library" -lgradcodec -Wl,-rpath,"$library" \
        -lm -pthread
}

for standard in c++11 c++17 c++20; do
    printf '#include <gradcodec/mpi.h>\ngc_transport_t f(gc_mpi_t *m) { return gc_mpi_transport(m); }\n' \
        >"$work/cpp.cpp"
    # shellcheck disable=SC2086
    "$bin/mpicxx" -std=$standard $flags -fsyntax-only "$work/cpp.cpp"
    echo "ok gradcodec/mpi.h as $standard"
done

compile tests/frameworks/native/mpi.c "$work/whole"
compile tests/frameworks/native/mpi.c "$work/parts" '-DGRADCODEC_MPI_PART=(size_t)40'
for program in whole parts; do
    for ranks in 1 4; do
        timeout 120 "$bin/mpirun" -n $ranks "$work/$program"
    done
done

compile examples_c/mpi.c "$work/mpi"
export GRADCODEC_LIBRARY="$library/libgradcodec.so.0" PYTHONPATH="$PWD/python"
PATH="$bin:$PATH" timeout 300 "$python" tests/commands.py mpi "$library" "$work/as_it_stands"
echo "ok: gradcodec/mpi.h, by $bin/mpicc"
