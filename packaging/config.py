"""gradcodec-config: prints the options that a compiler or CMake needs to use the library in this package.

    cc program.c -pthread $(gradcodec-config --includes --libs)
    cmake -S . -B build -Dgradcodec_DIR="$(gradcodec-config --cmakedir)"

--includes and --libs print a backslash before spaces and other characters that are special to a shell, as pkg-config
does. A package in such a folder is used by

    eval "cc program.c -pthread $(gradcodec-config --includes --libs)"

The manual is gradcodec.h itself, in the folder that --includes names. `man gradcodec` has a table of all functions.
"""

import argparse
import pathlib
import re


def main() -> None:
    """Prints the requested options, in one line."""
    here = pathlib.Path(__file__).resolve().parent
    quoted = re.sub(r"[^\w/.,:=@%+-]", r"\\\g<0>", str(here))
    header = (here / "include" / "gradcodec.h").read_text()
    version = ".".join(re.findall(r"#define GRADCODEC_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    answers = {
        "--includes": ("for the compiler: where gradcodec.h is", f"-I{quoted}/include"),
        "--libs": ("for the linker", f"-L{quoted}/lib -lgradcodec -Wl,-rpath,{quoted}/lib"),
        "--cmakedir": ("for CMake's gradcodec_DIR", f"{here}/lib/cmake/gradcodec"),
        "--version": ("of the library", version),
    }
    layout = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("gradcodec-config", description=__doc__, formatter_class=layout)
    for option, (words, _) in answers.items():
        parser.add_argument(option, help=words, action="append_const", dest="asked", const=option)
    asked = parser.parse_args().asked
    if not asked:
        parser.error(f"ask for one of {' '.join(answers)}")
    print(" ".join(answers[option][1] for option in asked))


if __name__ == "__main__":
    main()
