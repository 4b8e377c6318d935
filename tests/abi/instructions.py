"""Checks that each CPU loop is compiled for its instruction sets: instructions.py LIBRARY

`multiversion!` (src/cpu/dispatch.rs) makes an `avx2` and an `avx512` function from a generic one. A callee that is not
inlined is compiled without the instructions, and only the speed shows it. This program inspects the machine code of an
optimized library: every such function uses its set's registers and calls no function of gradcodec.
"""

import platform
import re
import subprocess
import sys

REGISTERS = {"avx2": "%ymm", "avx512": "%zmm"}


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library):
    """Returns the name of the function whose address the loader writes to each relocated slot."""
    named = [line.split(" ", 2) for line in output("nm", "-C", library).splitlines()]
    at = {int(address, 16): name for address, kind, name in (one for one in named if len(one) == 3 and one[0]) if kind in "tT"}
    slots = {}
    for line in output("readelf", "-rW", library).splitlines():
        words = line.split()
        if len(words) == 4 and "_RELATIV" in words[2]:
            slots[int(words[0], 16)] = at.get(int(words[3], 16), "")
    return slots


def variants(library):
    """Yields the name, instruction set and instructions of each function that is compiled for one set."""
    name, body = None, []
    for line in output("objdump", "-d", "-C", "--no-show-raw-insn", library).splitlines():
        head = re.match(r"[0-9a-f]+ <(.*)>:$", line)
        if head:
            if name:
                yield name, name.rsplit("::", 1)[1], body
            name = head[1] if re.search(r"::cpu::.*::avx(2|512)$", head[1]) and "::simd::" not in head[1] else None
            body = []
        elif name:
            body.append(line)


def called(instruction, slots):
    """Returns the name of the function that an instruction calls; empty for calls through a register."""
    direct = re.search(r"\bcall +[0-9a-f]+ <(.*)>", instruction)
    if direct:
        return direct[1]
    slot = re.search(r"\bcall .*# ([0-9a-f]+) <", instruction)
    return slots.get(int(slot[1], 16), "") if slot else ""


def main(library):
    slots = symbols(library)
    wrong, in_vectors, seen = set(), {}, 0
    for name, which, body in variants(library):
        seen += 1
  # Some casts have no vector instruction: one of the functions with the same name is enough.
        in_vectors[name] = in_vectors.get(name, False) or any(REGISTERS[which] in line for line in body)
        for line in body:
            other = called(line, slots)
            if re.match(r"<?gradcodec::", other):
                wrong.add(f"{name} calls {other}, which has none of its instructions: #[inline(always)] is missing")
    wrong |= {f"{name} has no {REGISTERS[name.rsplit('::', 1)[1]]}" for name, found in in_vectors.items() if not found}
    if not seen and platform.machine() != "x86_64":
        print("this processor has one instruction set")
    elif seen < 100:
        wrong.add(f"{library} has {seen} functions for instruction sets, 100 expected: it is stripped, or not optimized")
    for line in sorted(wrong):
        print(line)
    print(f"{seen} functions for instruction sets: {len(wrong) or 'nothing'} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
