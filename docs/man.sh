#!/bin/sh
# man.sh: prints gradcodec.7, the manual page. It takes the day from CHANGELOG.md, the description and the first sentence
# about each function from the header, and the variables from docs/ENVIRONMENT.md. `make install` runs it: it needs
# nothing but awk.
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
}
# The text at the top of the header: one line, an empty one, and a paragraph.
FILENAME ~ /gradcodec\.h$/ && /^\/\*$/ && !functions { about = 1; next }
about == 1 {
    said = tolower(substr($0, 4, 1)) substr($0, 5)
    sub(/\.$/, "", said)
    print ".SH NAME\ngradcodec \\- " roff(said)
    print ".SH SYNOPSIS\n.nf\n.B #include <gradcodec.h>\n.PP"
    print ".B cc program.c $(pkg-config \\-\\-cflags \\-\\-libs gradcodec)\n.fi\n.SH DESCRIPTION"
    said = ""
    about = 2
    next
}
about == 2 { about = 3; next }
about == 3 && /^ \*$/ {
    print ".PP\nThe manual is"
    print ".I gradcodec.h\nitself: it says of each function what it does, what its parameters are, and what can go wrong. Its"
    print "folder is what"
    print ".B pkg-config \\-\\-variable=includedir gradcodec\nprints. Documents and examples are in"
    print ".IR share/doc ;\n.I docs/API.md\nthere has the rules for all functions. In the sources"
    print ".B make site\nmakes web pages of all of them, with a search."
    print ".SH FUNCTIONS"
    about = 0
    functions = 1
    next
}
about == 3 { print roff(substr($0, 4)) }

# A section of the header has its title in capitals. A comment begins with two stars.
functions && FILENAME ~ /gradcodec\.h$/ {
    if (/^ \* [A-Z][A-Z -]*$/)
        print ".SS " substr($0, 4)
    if (/^\/\*\*/)
        said = ""
    if (/^(\/\*\*| \*)/) {
        sub(/^(\/\*\*| \*) */, "")
        sub(/ *\*?\/$/, "")
        said = said (said == "" ? "" : " ") $0
    } else if (!/^typedef/ && /^[a-z]/ && match($0, /gc_[a-z0-9_]+\(/)) {
        name = substr($0, RSTART, RLENGTH - 1)
        match(said, /\.( |$)/)
        said = substr(said, 1, RSTART)
        entry()
    }
    next
}

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
