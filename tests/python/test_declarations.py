"""python/gradcodec declares the functions of the library as tests/abi/functions.h promises them."""

import pathlib
import re
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p

from gradcodec import GradCodec
from gradcodec import _declarations as client

ROOT = pathlib.Path(__file__).parents[2]

TYPES = {
    "void": None, "void *": c_void_p, "char *": c_char_p, "void (*)(void *)": c_void_p, "float": c_float, "int": c_int,
    "int32_t": c_int32, "int64_t": c_int64, "uint8_t": c_uint8, "uint32_t": c_uint32, "uint64_t": c_uint64,
    "size_t": c_size_t, "gc_status_t": c_int32, "gc_bit_order_t": c_int32, "gc_decode_t": c_int32,
}  # fmt: skip
NUMBERS = "gc_comm_rank", "gc_comm_world_size", "gc_allreduce_exchanges", "gc_codec_exchanges"  # an int32 that is no status


def type_of(text):
    """Returns the ctypes type of a C declaration."""
    text = " ".join(re.sub(r"\b(const|struct)\b", "", text).split()).replace("* *", "**")
    if text in TYPES:
        return TYPES[text]
    return POINTER(type_of(text[:-1])) if text.endswith("*") else getattr(client, text)


def test_the_client_declares_every_function_of_the_list():
    functions = re.findall(
        r"^FUNCTION\((\w+), (.*?), \((.*?)\)\)$", (ROOT / "tests/abi/functions.h").read_text(), re.M | re.S
    )
    promised = {
        name: (type_of(result), [type_of(part) for part in re.split(r",(?![^()]*\))", parameters) if part != "void"])
        for name, result, parameters in functions
    }
    assert client.FUNCTIONS == promised
    library = GradCodec()
    for name, (result, _) in promised.items():
        is_status = result is c_int32 and name not in NUMBERS
        assert getattr(library.lib, name).restype == (library._check if is_status else result), name
