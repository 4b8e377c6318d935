"""Which cases run: GRADCODEC_TESTS is quick, which `make test` runs, or all, which `make test-all` runs."""

import os

TIER = os.environ.get("GRADCODEC_TESTS") or "quick"
if TIER not in ("quick", "all"):
    raise ValueError(f"GRADCODEC_TESTS: quick or all expected, got {TIER!r}")


def both(*, quick, all):
    """Cases of a test, or how many there are. What quick has, all has too."""
    if isinstance(quick, int):
        assert quick <= all, (quick, all)
    else:
        quick, all = list(quick), list(all)
        assert [case for case in quick if case not in all] == []
    return quick if TIER == "quick" else all


# What a call of the driver gives when it fails, and what becomes of it. The library tells apart memory that is not there,
# a context that is lost and all others, of which 201, no context, is also an answer.
CODES = [(123456, "CUDA"), (2, "OUT_OF_MEMORY"), (201, "CUDA"), (700, "CONTEXT_LOST")]


def each_code(functions, few):
    """(function, code, status): few functions with the first code and the first of them with the others; or all with all."""
    quick = [(one, *CODES[0]) for one in few] + [(few[0], *code) for code in CODES[1:]]
    return both(quick=quick, all=[(one, *code) for code in CODES for one in functions])
