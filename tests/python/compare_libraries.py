"""Runs random cases of all codecs through two libraries and compares every byte, status and flag that comes out.

    build/venv/bin/python tests/python/compare_libraries.py OLD NEW [CASES [FIRST_SEED]]

OLD and NEW are paths of libgradcodec.so.0. Half of the CASES (3,000) are of ONEBIT and SIGN, half of block codecs. A case is
`one_case` of codecs_c.py: a few steps of encode, decode, reduce, commit and errors_in with any dtypes, factors, segments, raw
segments, chunks and policies, and payloads that no encoder writes. Each library is held to the model of docs/NUMERICS.md, too.
"""

import ctypes
import hashlib
import os
import subprocess
import sys


def outcomes(cases, first_seed):
    """A line a case: its seed and the digest of everything that came out of the library."""

    class Older(ctypes.CDLL):
        """A library that may lack functions which the declarations of the tests have."""

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return ctypes.CFUNCTYPE(None)()

    ctypes.CDLL = Older
    import codecs_c

    compare, digest = codecs_c.same, None

    def same(got, expected, what):
        digest.update(what.encode() + codecs_c.np.ascontiguousarray(got).tobytes())
        compare(got, expected, what)

    codecs_c.same = same
    for seed in range(first_seed, first_seed + cases):
        digest = hashlib.sha256()
        kind = codecs_c.random_block_options if seed % 2 else codecs_c.random_options
        options = codecs_c.one_case(codecs_c.Host(), seed, 3000 if seed % 10 else 30_000, kind)
        print(seed, options["codec"], digest.hexdigest(), flush=True)


def main():
    if sys.argv[1] == "--outcomes":
        return outcomes(*map(int, sys.argv[2:]))
    libraries, (cases, seed) = sys.argv[1:3], (sys.argv[3:] + ["3000", "0"][len(sys.argv) - 3 :])[:2]
    runs = [
        subprocess.Popen(
            [sys.executable, __file__, "--outcomes", cases, seed], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "GRADCODEC_LIBRARY": os.path.abspath(library)},
        )  # fmt: skip
        for library in libraries
    ]
    old, new = [run.communicate()[0].splitlines() for run in runs]
    different = [one for one, other in zip(old, new) if one != other]
    for one in different[:20]:
        print(f"DIFFERENT: seed and codec {' '.join(one.split()[:2])}")
    complete = len(old) == len(new) == int(cases) and not any(run.returncode for run in runs)
    codecs = sorted({int(one.split()[1]) for one in old})
    print(f"{min(len(old), len(new))} of {cases} cases, codecs {codecs}: {len(different)} different")
    return 0 if complete and not different else 1


if __name__ == "__main__":
    sys.exit(main())
