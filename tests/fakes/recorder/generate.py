"""Writes the source of a library with every function of gradcodec.h. The functions compute nothing: recorded() returns
one line of text for each call since the last recorded(). For tests of the language bindings.

    python3 generate.py include/gradcodec.cdef.h > recorder.c

A tensor is written as `t` and its address, a handle as `h` and its number, a list in brackets. Options list only the
fields that are not 0. Output arguments get made-up values and are written as `out`."""

import re
import sys

HANDLES = "gc_codec_t", "gc_comm_t", "gc_allreduce_t", "gc_share_t", "gc_kernel_t"
VERSIONED = "struct DLManagedTensorVersioned *"
# Name of the argument that holds the length of an array argument.
LENGTHS = {
    "values": "n_values", "inputs": "n_inputs", "outputs": "n_outputs", "chunks": "n_chunks", "scales": "n_chunks",
    "shape": "ndim", "strides": "ndim", "segments": "n_segments", "axes": "n_axes", "options": "n_options",
    "buffers": "world_size", "out_chunks": "n_chunks", "raw": "n_segments",
}  # fmt: skip
PRELUDE = r"""
#include <gradcodec.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char text[1 << 16];
static size_t length;
static size_t made;

static void say(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    length += (size_t)vsnprintf(text + length, sizeof text - length, format, arguments);
    va_end(arguments);
}

const char *recorded(void);
const char *recorded(void) {
    static char last[sizeof text];
    memcpy(last, text, length + 1);
    text[length = 0] = 0;
    return last;
}

static void say_view(const DLTensor *tensor) {
    if (tensor) say("t%zu", (size_t)tensor->data);
    else say("NULL");
}
static void say_managed(const DLManagedTensor *tensor) { say_view(tensor ? &tensor->dl_tensor : NULL); }
static void say_versioned(const struct DLManagedTensorVersioned *tensor) { say_view(tensor ? &tensor->dl_tensor : NULL); }
static void say_handle(const void *handle) {
    if (handle) say("h%zu", (size_t)handle);
    else say("NULL");
}
static void say_address(const void *address) {
    if (address) say("%#zx", (size_t)address);
    else say("NULL");
}
static void say_string(const char *string) {
    if (string) say("'%s'", string);
    else say("NULL");
}

/* Tensors that functions give: numbers from 900 on, one dimension of 3 bytes. */
static int64_t three[1] = {3};
static DLManagedTensor given[100];
static struct DLManagedTensorVersioned given_versioned[100];
static unsigned n_given;
static DLManagedTensor *new_tensor(void) {
    DLManagedTensor *tensor = &given[n_given % 100];
    memset(tensor, 0, sizeof *tensor);
    tensor->dl_tensor.data = (void *)(size_t)(900 + n_given++ % 100);
    tensor->dl_tensor.device.device_type = kDLCPU;
    tensor->dl_tensor.dtype.code = kDLUInt;
    tensor->dl_tensor.dtype.bits = 8;
    tensor->dl_tensor.dtype.lanes = 1;
    tensor->dl_tensor.ndim = 1;
    tensor->dl_tensor.shape = three;
    return tensor;
}
static struct DLManagedTensorVersioned *new_versioned(void) {
    struct DLManagedTensorVersioned *tensor = &given_versioned[n_given % 100];
    memset(tensor, 0, sizeof *tensor);
    tensor->version.major = 1;
    tensor->dl_tensor = new_tensor()->dl_tensor;
    return tensor;
}
"""


def split(kind_and_name):
    """`const int64_t *shape` -> ("const int64_t *", "shape")."""
    function = re.fullmatch(r"(.*)\(\*(\w+)\)(\(.*\))", kind_and_name)
    if function:
        return "function", function[2]
    kind, name = re.fullmatch(r"(.*?)(\w+)(?:\[\w+\])?", kind_and_name).groups()
    return kind.strip(), name


def parts(text, separator):
    """Splits at separators outside of brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == separator and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [part for part in [*found, current.strip()] if part]


def element(kind):
    """Returns the C statement that prints one element of an array of type `kind`, or None."""
    one = kind.replace("const ", "").replace(" const", "").replace(" ", "")
    return {
        "DLTensor**": "say_view({})", "DLManagedTensor**": "say_managed({})", "int64_t*": 'say("%lld", (long long){})',
        "int32_t*": 'say("%d", (int){})', "uint8_t*": 'say("%d", (int){})', "float*": 'say("%g", (double){})', "char**": "say_string({})",
        "void**": "say_address({})",
    }.get(one)  # fmt: skip


def array(kind, place, count):
    one = element(kind).format(f"{place}[i]")
    return (
        f'if (!{place}) say("NULL"); else {{ say("["); for (size_t i = 0; i < (size_t){count}; i++) '
        f'{{ if (i) say(" "); {one}; }} say("]"); }}'
    )


def said(kind, place, name, siblings, structs):
    """Returns the C statement that prints one argument or field."""
    plain = kind.replace("const ", "").strip()
    length = LENGTHS.get(name)
    if kind == "function":
        return f'say("%s", {place} ? "f" : "NULL");'
    if length in siblings and element(kind):
        return array(kind, place, place.replace(name, length))
    if plain == "DLDevice":
        return f'say("%d:%d", (int){place}.device_type, (int){place}.device_id);'
    if plain == "DLDataType":
        return f'say("%d.%d.%d", {place}.code, {place}.bits, {place}.lanes);'
    if plain == "float":
        return f'say("%g", (double){place});'
    if plain.rstrip(" *") in structs and plain.endswith("*") and kind.startswith("const"):
        return f"say_{plain.rstrip(' *')}({place});"
    by_type = {
        "DLTensor *": "say_view", "DLManagedTensor *": "say_managed", VERSIONED: "say_versioned", "char *": "say_string",
        "void *": "say_address",
    }  # fmt: skip
    if plain in by_type:
        return f"{by_type[plain]}({place});"
    if plain == "uint8_t *":
        return f'say("%d-%d", {place}[0], {place}[127]);'
    if plain.rstrip(" *") in HANDLES and plain.endswith("_t *"):
        return f"say_handle({place});"
    if "*" in plain:
        raise SystemExit(f"what to say of {kind} {name}?")
    return f'say("%lld", (long long){place});'


def filled(kind, name, siblings):
    """Returns the C statement that fills an output argument, or None if the argument is an input."""
    plain = kind.replace(" ", "")
    if "const*" in plain or plain.startswith("const") and not plain.endswith("**"):
        return None
    if plain == "DLManagedTensor**":
        many = "n_chunks" if "n_chunks" in siblings and "n_elements" not in siblings else "1"
        return f"for (size_t i = 0; i < (size_t){many}; i++) {name}[i] = new_tensor();"
    if plain == VERSIONED.replace(" ", "") + "*":
        return f"*{name} = new_versioned();"
    if plain.endswith("_t**"):
        many = "world_size" if siblings == ["world_size", "out"] else "1"
        return f"for (size_t i = 0; i < (size_t){many}; i++) {name}[i] = (void *)++made;"
    return {
        "float*": f"*{name} = 2.5f;", "constchar**": f'*{name} = "log";', "constvoid**": f'*{name} = "fatbin";',
        "int64_t*": f"if ({name}) *{name} = 5;", "gc_part_t*": f"(void){name};", "size_t*": f"*{name} = 3;", "gc_kernel_shape_t*": f"{name}->threads = 11;",
        "uint8_t*": f"for (int i = 0; i < 128; i++) {name}[i] = (uint8_t)(i + 1);",
    }.get(plain)  # fmt: skip


def main():
    source = open(sys.argv[1]).read()
    structs = dict(re.findall(r"typedef struct (gc_\w+) \{ (.*?) \} gc_\w+;", source))
    print(PRELUDE)
    for name, body in structs.items():
        fields = [split(field) for field in parts(body, ";")]
        names = [field for _, field in fields]
        if f"const {name} *" not in source:
            continue  # the functions only write this struct
        print(f"static void say_{name}(const {name} *one) {{")
        print(f"    static const {name} zero;")
        print('    const char *between = "";')
        print('    if (!one) { say("NULL"); return; }')
        print('    say("{");')
        for kind, field in fields:
            if field == "struct_size":
                print('    if (one->struct_size != sizeof *one) say("struct_size %u", one->struct_size), between = " ";')
            elif field.startswith("reserved"):
                print(f"    for (size_t i = 0; i < sizeof one->{field}; i++)")
                print(f'        if (((const char *)&one->{field})[i]) say("%s{field}", between), between = " ";')
            else:
                print(f"    if (memcmp(&one->{field}, &zero.{field}, sizeof one->{field})) {{")
                print(f'        say("%s{field}=", between), between = " ";')
                print(f"        {said(kind, 'one->' + field, field, names, structs)}\n    }}")
        print('    say("}");\n}')
    for result, name, given in re.findall(r"^(\w[\w \*]*?)(gc_\w+)\((.*)\);$", source, re.M):
        if result.startswith("typedef"):
            continue
        arguments = [] if given == "void" else [split(part) for part in parts(given, ",")]
        names = [argument for _, argument in arguments]
        print(f"{result.strip()} {name}({given}) {{")
        print(f'    say("{name}(");')
        for number, (kind, argument) in enumerate(arguments):
            gives = filled(kind, argument, names)
            comma = f'say("{", " if number else ""}");'
            print(f"    {comma} " + (f'{gives} say("out");' if gives else said(kind, argument, argument, names, structs)))
        print('    say(")\\n");')
        answer = {"void": "", "const char *": f'return "{name}";', "gc_status_t": "return 0;"}
        print(f"    {answer.get(result.strip(), 'return 77;')}\n}}")


main()
