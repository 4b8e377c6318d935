#!/bin/sh
# private.sh WORK_DIR COMMAND...: runs a command as root of a mount namespace, with its own /usr/local and /etc, where
# ldconfig may write and nothing stays on the machine. Prints NOT RUN if a namespace is not allowed.
set -eu
[ $# -ge 2 ] || { echo "usage: $0 WORK_DIR COMMAND..." >&2; exit 2; }
if ! why=$(unshare -rm mount --bind /etc /etc 2>&1); then
    work=$1 && shift
    echo "NOT RUN, because this machine allows no mount namespace ($why): $*"
    exit 0
fi
# In /usr/local links replace the original files, so that a Python or a compiler in it still runs.
exec unshare -rm sh -euc '
    work=$(mkdir -p "$1" && cd "$1" && pwd) && shift
    mkdir "$work/original" "$work/local" "$work/etc"
    mount --rbind /usr/local "$work/original"
    cp -rs "$work/original/." "$work/local"
    find "$work/local" -name "*gradcodec*" -prune -exec rm -r {} +
    mount --bind "$work/local" /usr/local
    cp -r /etc/. "$work/etc" 2>"$work/unreadable" || true # secrets, which nothing here needs
    mount --bind "$work/etc" /etc
    [ ! -d /var/cache/ldconfig ] || mount -t tmpfs none /var/cache/ldconfig
    PATH=$PATH:/usr/sbin:/sbin
    ldconfig
    exec "$@"
' sh "$@"
