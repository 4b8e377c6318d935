"""Selects the cases that run: GRADCODEC_TESTS is quick, for `make test`, or all, for `make test-all`."""

import os

TIER = os.environ.get("GRADCODEC_TESTS") or "quick"
if TIER not in ("quick", "all"):
    raise ValueError(f"GRADCODEC_TESTS: quick or all expected, got {TIER!r}")


def both(*, quick, all):
    """Returns the cases of a test, or their number. The cases of quick are in all, too."""
    if isinstance(quick, int):
        assert quick <= all, (quick, all)
    else:
        quick, all = list(quick), list(all)
        assert [case for case in quick if case not in all] == []
    return quick if TIER == "quick" else all


# Codes with which a call of the driver fails, and the resulting statuses. The library distinguishes missing memory, a
# lost context and all other codes. 201, no context, may also be a regular answer.
CODES = [(123456, "CUDA"), (2, "OUT_OF_MEMORY"), (201, "CUDA"), (700, "CONTEXT_LOST")]


def each_code(functions, few):
    """Returns (function, code, status): `few` with the first code and few[0] with the others; or all with all."""
    quick = [(one, *CODES[0]) for one in few] + [(few[0], *code) for code in CODES[1:]]
    return both(quick=quick, all=[(one, *code) for code in CODES for one in functions])
