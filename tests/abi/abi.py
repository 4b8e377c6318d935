#!/usr/bin/env python3
"""Checks the ABI of gradcodec.h, one fact per line: every released fact still holds, and every fact is on file.

    abi.py CC INCLUDE_DIR            compares with the files gradcodec-*.abi of this major version in this folder
    abi.py CC INCLUDE_DIR --print    prints the facts, the content of such a file

A fact is a function and its type, a constant and its value, a struct or field and its layout, or an alias. The
declarations come from gradcodec.cdef.h, which has one per line; sizes and values come from the compiler. The file of a
version may change until that version is released.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

PROGRAM = r"""
#include <gradcodec.h>
#include <stdio.h>
#define CONSTANT(name) printf("constant %s %lld\n", #name, (long long)(name));
#define ENUM(name) printf("enum %s: %zu bytes\n", #name, sizeof(name));
#define STRUCT(name, type) printf("struct %s: %zu bytes, aligned to %zu\n", #name, sizeof(type), _Alignof(type));
#define OPTIONS(name, type) printf("struct %s: begins with its size, aligned to %zu\n", #name, _Alignof(type));
#define FIELD(name, type, field, its_type) \
    printf("field %s.%s %s at %zu, %zu bytes\n", #name, #field, its_type, offsetof(type, field), \
           sizeof(((type *)0)->field));
int main(void) {
%s
}
"""


def nameless(declaration):
    """Removes the names of parameters and of the declared item: `void (*release)(void *ctx);` becomes `void (*)(void
    *)`, and `uint32_t reserved[3];` becomes `uint32_t [3]`."""
    rest = re.sub(r"(?<=[ *])\w+(?=[,);[])", "", declaration).replace(" ,", ",").replace(" )", ")").rstrip("; ")
    if re.search(r"[(,] ?[,)]", rest):
        sys.exit(f"a parameter without a name: {declaration}")
    return rest


def facts_of(line):
    """Yields the C statements that print the facts of one declaration."""

    def text(fact):
        return f'puts("{fact}");'

    body = line[line.find("{") + 1 : line.rfind("}")].strip()
    name = re.search(r"(\w+);$", line)
    if line.startswith(("/*", "static const ")) or re.fullmatch(r"struct \w+;", line):
        return
    if re.match(r"(typedef )?enum\b.*{", line):
        yield from (f"CONSTANT({constant})" for constant in re.findall(r"(\w+) = ", body))
        if name:
            yield f"ENUM({name[1]})"
    elif match := re.match(r"(typedef )?(struct \w+|struct) {", line):
        name = name[1] if match[1] else match[2].split()[1]
        type = name if match[1] else match[2]
        fields = re.findall(r"\s*([^;]+);", body)
        fields = [(re.search(r"\(\*(\w+)|(\w+)(\[\d+\])?$", field), field) for field in fields]
        fields = [(found[1] or found[2], nameless(field + ";")) for found, field in fields]
        # Structs of options grow at the end (docs/ABI.md), so their size is not part of the ABI.
        yield f"{'OPTIONS' if fields[0][0] == 'struct_size' else 'STRUCT'}({name}, {type})"
        yield from (f'FIELD({name}, {type}, {field}, "{its_type}")' for field, its_type in fields)
    elif match := re.match(r"typedef (.*?\(\*(\w+)\).*|.*?(\w+));$", line):
        yield text(f"type {match[2] or match[3]} {nameless(match[1] + ';')}")
    elif match := re.match(r"(.*?)(gc_\w+)(\(.*\));$", line):
        yield text(f"function {match[2]} {match[1].strip()}{nameless(match[3])}")
    else:
        sys.exit(f"not understood: {line}")


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def current_facts(cc, include):
    lines = (include / "gradcodec.cdef.h").read_text().splitlines()
    statements = [statement for line in lines for statement in facts_of(line)]
    macros = run(cc, "-E", "-dM", f"-I{include}", str(include / "gradcodec.h"))
    statements += [f"CONSTANT({name})" for name in re.findall(r"#define (GC_\w+(?<!_INIT)|DLPACK_FLAG_\w+) ", macros)]
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder, "facts.c")
        source.write_text(PROGRAM.replace("%s\n}", "\n".join(statements) + "\n}"))
        run(cc, "-std=c11", f"-I{include}", str(source), "-o", f"{folder}/facts")
        return sorted(set(run(f"{folder}/facts").splitlines()))


def subject(fact):
    """Returns a fact's subject, its first two words."""
    return tuple(fact.split()[:2])


def compare(released, current):
    """Prints broken and added facts, and returns the number of each."""
    before, now = {subject(fact) for fact in released}, {subject(fact): fact for fact in current}
    broken = sorted(set(released) - set(current))
    for fact in broken:
        if subject(fact) in now:
            print(f"CHANGED  {fact}\n     to  {now[subject(fact)]}")
        else:
            print(f"REMOVED  {fact}")
    added = [fact for fact in current if subject(fact) not in before]
    for fact in added:
        print(f"added    {fact}")
    return len(broken), len(added)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    cc, include = sys.argv[1], pathlib.Path(sys.argv[2])
    current = current_facts(cc, include)
    if sys.argv[3:] == ["--print"]:
        print("\n".join(current))
        return
    here = pathlib.Path(__file__).parent
    version = re.findall(r"#define GRADCODEC_VERSION_M(?:AJOR|INOR) (\d+)", (include / "gradcodec.h").read_text())
    files = sorted(here.glob(f"gradcodec-{version[0]}.*.abi"))
    released = {fact for file in files for fact in file.read_text().splitlines()}
    broken, added = compare(released, current)
    names = ", ".join(file.name for file in files) or "no file of this major version"
    print(f"{len(current)} facts: {broken} of the {len(released)} in {names} broken, {added} added")
    if broken:
        sys.exit("FAILED: what was released is changed or gone; programs that rely on it would break (docs/ABI.md)")
    if added:
        sys.exit(
            "FAILED: no file has what is added. The one of the version under development takes it:\n"
            f"    python3 tests/abi/abi.py cc include --print >tests/abi/gradcodec-{'.'.join(version)}.abi"
        )


main()
