#!/bin/sh
# commit.sh: prints the commit of these sources, with -dirty if they are not as they are there; nothing without a
# repository. Fails where there is one that git does not read: it trusts no folder of another user.
set -eu
cd "$(dirname "$0")/.."
[ -e .git ] || exit 0
git describe --always --dirty --abbrev=12 '--exclude=*' ||
    { echo "FAILED: git does not say which commit this is; GRADCODEC_COMMIT may" >&2; exit 1; }
