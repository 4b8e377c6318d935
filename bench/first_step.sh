#!/bin/sh
# first_step.sh WHEEL [PYTHON]: prints the seconds from the wheel to the first compressed step of
# DistributedDataParallel, in a new environment: of each command, and of all. The program is that of docs/START.md, two
# ranks over gloo. PYTHON: python of an environment with PyTorch, which is used in place of a download (several GB).
set -eu
[ $# -ge 1 ] || { echo "usage: $0 WHEEL [PYTHON]" >&2; exit 2; }
wheel=$(realpath "$1")
packages=
if [ -n "${2:-}" ]; then packages=$("$2" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); fi
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset GRADCODEC_LIBRARY GRADCODEC_INCLUDE LD_LIBRARY_PATH PYTHONPATH
cd "$work"

{
    cat <<'END'
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.nn.Linear(256, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batches, loss = [(torch.randn(8, 256), torch.randn(8, 64))], torch.nn.functional.mse_loss
END
    awk '$0 == "```" { inside = 0 } inside { print } $0 == "```python" { inside = ++seen == 1 }' "$root/docs/START.md"
    printf 'assert 0 < compression.bytes_sent < 0.3 * 4 * 256 * 64\nos._exit(0)\n'
} > first.py

now() { date +%s.%N; }
total=0 commands=0
timed() { # COMMAND...
    from=$(now)
    "$@" > log 2>&1 || { cat log; echo "FAILED: $*" >&2; exit 1; }
    took=$(echo "$(now) $from" | awk '{ printf "%.1f", $1 - $2 }')
    total=$(echo "$total $took" | awk '{ printf "%.1f", $1 + $2 }')
    commands=$((commands + 1))
    echo "$took s: $(echo "$*" | sed "s|$work/||g; s|$(dirname "$wheel")/||g")"
}
timed python3 -m venv env
if [ -n "$packages" ]; then
    echo "$packages" > "$(env/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/there.pth"
    echo "PyTorch is there already: $(env/bin/python -c 'import torch; print(torch.__version__)')"
else
    timed env/bin/python -m pip install -c "$root/tests/constraints.txt" torch numpy
fi
timed env/bin/python -m pip install --no-index "$wheel"
# The first call on a machine with GPUs also does this. CXX=/nowhere shows the message without a compiler.
export GRADCODEC_CACHE_DIR="$work/cache"
from=$(now)
if env/bin/python -m gradcodec.torch build > log 2>&1; then
    echo "$(now) $from" | awk '{ printf "%.1f s, on GPUs: python -m gradcodec.torch build\n", $1 - $2 }'
else
    cat log
fi
GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 timed env/bin/python -m torch.distributed.run --nproc_per_node 2 first.py
echo "first compressed step: $commands commands, $total s; $(wc -c < "$wheel") bytes of wheel"
