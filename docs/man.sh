#!/bin/sh
# man.sh: prints gradcodec.7, the manual page, made of the day in CHANGELOG.md, the table of functions at the head of
# the header and the library's variables in docs/ENVIRONMENT.md. It needs nothing but awk: `make install` runs it.
set -eu
cd "$(dirname "$0")/.."
exec awk '
# roff(TEXT): Markdown on one line for roff: code in bold, a minus where it is one, no line that begins with a command
function roff(text,    parts, count, i, made) {
    gsub(/\\/, "\\e", text)
    count = split(text, parts, "`")
    for (i = 1; i <= count; i++)
        if (i % 2 == 0) {
            gsub(/-/, "\\-", parts[i])
            made = made "\\fB" parts[i] "\\fR"
        } else {
            while (match(parts[i], /(^|[ (])-[0-9a-z]/))
                parts[i] = substr(parts[i], 1, RSTART + RLENGTH - 3) "\\" substr(parts[i], RSTART + RLENGTH - 2)
            # *emphasis*, of one word
            while (match(parts[i], /\*[a-z]+\*/))
                parts[i] = substr(parts[i], 1, RSTART - 1) "\\fI" substr(parts[i], RSTART + 1, RLENGTH - 2) "\\fR" \
                    substr(parts[i], RSTART + RLENGTH)
            made = made parts[i]
        }
    return made ~ /^[.\047]/ ? "\\&" made : made
}
function entry() {
    if (name != "")
        print ".TP\n.B " name "\n" roff(said)
    name = said = ""
}

FILENAME ~ /CHANGELOG/ {
    if (/^## \[/) {
        day = $NF ~ /^[0-9-]+$/ ? $NF : "" # none before the release
        nextfile
    }
    next
}
FILENAME ~ /gradcodec\.h$/ && /^\/\* gradcodec.h, version/ {
    version = $4
    sub(/\.$/, "", version)
    print ".\\\" Made by docs/man.sh."
    print ".TH GRADCODEC 7 \"" day "\" \"gradcodec " version "\""
    print ".SH NAME\ngradcodec \\- gradients at one bit per element, and tensors between frameworks"
    print ".SH SYNOPSIS\n.nf\n.B #include <gradcodec.h>\n.PP"
    print ".B cc program.c $(pkg-config \\-\\-cflags \\-\\-libs gradcodec)\n.fi\n.SH DESCRIPTION"
}
FILENAME ~ /gradcodec\.h$/ && /^ \* This library /  { about = 1 }
about && /^ \*$/ {
    about = 0
    print ".PP\nThe manual is"
    print ".I gradcodec.h\nitself: after the table that is below it says what holds for all functions, and of each what it does,"
    print "what its parameters are, and what can go wrong. Its folder is what"
    print ".B pkg-config \\-\\-variable=includedir gradcodec\nprints, and examples are in"
    print ".IR share/doc .\nIn the sources"
    print ".B make site\nmakes web pages of it and of all documents, with a search."
    print ".SH FUNCTIONS"
}
about { print roff(substr($0, 4)) }
FILENAME ~ /gradcodec\.h$/ && /^ \* FUNCTIONS$/ { table = 1; next }
table && /^ \* TWO TIERS$/ { entry(); table = 0; nextfile }
table && /^ \* [A-Z]/ { entry(); print ".SS " substr($0, 4) }
table && /^ \*   gc_/ { entry(); name = $2; said = $0; sub(/^ \*   gc_[a-z0-9_]* +/, "", said) }
table && /^ \*    +[^ ]/ && !/^ \*   gc_/ { more = $0; sub(/^ \* +/, "", more); said = said " " more }

FILENAME ~ /ENVIRONMENT\.md$/ && /^## / {
    library = $0 == "## The library"
    if (library)
        print ".SH ENVIRONMENT\nWhat the library reads; none has to be set."
}
library && /^\| `/ {
    split($0, cells, / *\| */)
    name = substr(cells[2], 2, length(cells[2]) - 2)
    # "likewise" is of the line before.
    when = cells[4] == "likewise" ? when : cells[4]
    said = cells[3] " It is read " when "."
    entry()
}
END {
    print ".SH REPORTING BUGS\nA report should include what"
    print ".BR gc_build_info ()\nsays: version, commit, instruction set, and the CUDA driver, NCCL and NVRTC of the process."
    print ".SH SEE ALSO\n.BR pkg-config (1);\n.B gradcodec-config \\-\\-help\nin the Python package."
}
' CHANGELOG.md include/gradcodec.h docs/ENVIRONMENT.md
