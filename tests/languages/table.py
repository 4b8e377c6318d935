"""Whether docs/LANGUAGES.md has the examples as they are: their lengths in its table, and its code in them, by lines.

    python3 tests/languages/table.py
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHOWN = {
    "python": "examples/python/*.py", "cpp": "examples_cpp/*.cpp", "rust": "examples/rust/*.rs", "go": "examples/go/*.go",
    "java": "examples/java/*.java", "lua": "examples/lua/*.lua", "fortran": "examples/fortran/*.f90",
    "csharp": "examples/csharp/*.cs",
}  # fmt: skip
NOT_RUN = {"julia", "c++"}
SAID = {"sh"}  # commands; those of examples stand at their top, too
OF_A_READER = {"gradcodec = GradCodec()", "chunks = gradcodec.pack_chunks(positive, 4)"}


def lines_of(pattern):
    return {line.strip() for path in ROOT.glob(pattern) for line in path.read_text().splitlines()}


def main():
    text = (ROOT / "docs" / "LANGUAGES.md").read_text()
    wrong = []
    for example, count in re.findall(r"^\|[^|]*\|(.*?examples[_/].*?)\| ([0-9+ ]+) \|", text, re.M):
        files = re.findall(r"`(examples[_/][^`]*)`", example)
        are = [len((ROOT / file).read_text().splitlines()) for file in files]
        if [int(number) for number in count.split("+")] != are:
            wrong.append(f"{example.strip()}: {' + '.join(map(str, are))} lines, not {count}")
    for language, code in re.findall(r"^```([a-z+]+)\n(.*?)^```$", text, re.M | re.S):
        if language in NOT_RUN | SAID:
            continue
        there = lines_of(SHOWN[language])
        wrong += [f"{language}: not in an example: {line}" for line in code.splitlines()
                  if line.strip() and line.strip() not in there | OF_A_READER]  # fmt: skip
    for line in wrong:
        print(line)
    sys.exit("FAILED: docs/LANGUAGES.md is not as the examples are" if wrong else 0)


if __name__ == "__main__":
    main()
