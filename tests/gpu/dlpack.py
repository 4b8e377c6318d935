"""Capsules, made and opened by hand."""

import ctypes
from ctypes import byref, c_char_p, c_void_p

from capi import CUDA, Managed, Versioned, lib

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
DESTRUCTOR = ctypes.cast(lib.gc_capsule_destructor, c_void_p)


def from_python(name, result, *arguments):
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


capsule_new = from_python("PyCapsule_New", ctypes.py_object, c_void_p, c_char_p, c_void_p)
capsule_pointer = from_python("PyCapsule_GetPointer", c_void_p, ctypes.py_object, c_char_p)
capsule_is_valid = from_python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, c_char_p)
capsule_set_name = from_python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, c_char_p)


class Exporter:
    """What from_dlpack asks for, around one capsule."""

    def __init__(self, capsule, index=0):
        self.capsule, self.index = capsule, index

    def __dlpack__(self, **_requests):
        return self.capsule

    def __dlpack_device__(self):
        return CUDA, self.index


def capsule(tensor, form):
    """A capsule of a tensor of the library, which owns it."""
    if form is VERSIONED:
        out = Versioned()
        assert lib.gc_tensor_to_versioned(tensor, byref(out)) == 0
        tensor = out
    return capsule_new(ctypes.cast(tensor, c_void_p), form, DESTRUCTOR)


def form_of(capsule):
    return next(form for form in (LEGACY, VERSIONED) if capsule_is_valid(capsule, form))


def managed(capsule):
    """A borrowed tensor of a capsule of either form, which stays its owner: the capsule must outlive it."""
    form = form_of(capsule)
    address = capsule_pointer(capsule, form)
    if form is LEGACY:
        return ctypes.cast(address, Managed)
    borrowed = Managed._type_(ctypes.cast(address, Versioned).contents.dl_tensor)
    return ctypes.pointer(borrowed)
