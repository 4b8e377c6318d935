#!/bin/sh
# commit.sh: prints the commit of these sources, with -dirty if they have changes; prints nothing without a repository.
# Fails if git refuses to read the repository, for example if another user owns the folder.
set -eu
cd "$(dirname "$0")/.."
[ -e .git ] || exit 0
git describe --always --dirty --abbrev=12 '--exclude=*' ||
    { echo "FAILED: git does not say which commit this is; GRADCODEC_COMMIT may" >&2; exit 1; }
