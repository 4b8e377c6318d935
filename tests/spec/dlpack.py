"""Capsules of tensors on CUDA."""

import ctypes
from ctypes import byref, c_void_p

from capi import CUDA, Managed, Versioned, lib
from capsules import DESTRUCTOR, LEGACY, VERSIONED, Exporter, capsule_is_valid, capsule_new, capsule_pointer


def exporter(capsule, index=0):
    """What from_dlpack asks for, of a device."""
    return Exporter(capsule, (CUDA, index))


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
