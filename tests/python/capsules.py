"""Python's capsules, made and opened by hand."""

import ctypes

from capi import CPU, c_char_p, c_void_p, lib

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
DESTRUCTOR = ctypes.cast(lib.gc_capsule_destructor, c_void_p)


def from_python(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


capsule_new = from_python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
capsule_pointer = from_python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
capsule_is_valid = from_python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, c_char_p)


class Exporter:
    """Object for from_dlpack(), with one capsule."""

    def __init__(self, capsule, device=(CPU, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **_requests):
        return self.capsule

    def __dlpack_device__(self):
        return self.device
