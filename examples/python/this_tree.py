"""Finds this tree, and the library to build against, for the scripts beside this file."""

import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def library():
    """Returns the path of libgradcodec.so.0: named by GRADCODEC_LIBRARY, or built in this tree."""
    named = os.environ.get("GRADCODEC_LIBRARY")
    places = [pathlib.Path(named)] if named else [ROOT / lib / "libgradcodec.so.0" for lib in ("lib", "target/release")]
    found = next((place.absolute() for place in places if place.exists()), None)
    if found is None:
        raise SystemExit(f"no library at {' or '.join(map(str, places))}: make, or set GRADCODEC_LIBRARY")
    return found
