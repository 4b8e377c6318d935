# Functions of .ci/run and .ci/nightly, which source this file in the repository's root. They run stages and show each
# output at its end, and install tools. The last lines show what this machine could not run, the end of each failed
# stage's output, and the number of passed stages.

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
touch "$logs/not_run" "$logs/outcomes" "$logs/failed"

why() { # NAME LOG: prints pytest's failed tests and assertions, and the end of the output
    echo "FAILED $1:"
    { grep -E '^(FAILED|ERROR|E  ) ' "$2" | tail -n 30; tail -n 15 "$2"; } | cut -c 1-300
}

stage() { # NAME COMMAND...
    local log outcome=passed start=$SECONDS
    log=$(mktemp "$logs/XXXXXX")
    { flock 9 && echo "-- $1"; } 9>"$logs/lock"
    "${@:2}" >"$log" 2>&1 || outcome=FAILED
    {
        flock 9 # only one lane writes at a time
        echo "== $1: $outcome, $((SECONDS - start)) s"
        cat "$log"
        echo "$outcome $1" >>"$logs/outcomes"
        [ $outcome = passed ] || why "$1" "$log" >>"$logs/failed"
        grep -E 'NOT RUN, because|^SKIPPED[: ][^[]' "$log" | sort -u | sed "s|^|$1: |" >>"$logs/not_run"
    } 9>"$logs/lock"
}

lane_ended() {
    echo "ended" >>"$logs/outcomes"
}

# Installs missing packages. Without apt-get, or without the right to use it, the stage that needs a package reports it.
# The packages have no exact versions: Debian's archive has only the current one of a release.
packages() {
    local sudo=sudo missing=()
    [ "$(id -u)" -ne 0 ] || sudo=
    { command -v cc && command -v gcc; } >/dev/null || missing+=(gcc libc6-dev)
    command -v g++ >/dev/null || missing+=(g++)
    command -v make >/dev/null || missing+=(make)
    command -v valgrind >/dev/null || missing+=(valgrind)
    command -v xz >/dev/null || missing+=(xz-utils)
    command -v mandoc >/dev/null || missing+=(mandoc)
    { command -v nm && command -v readelf; } >/dev/null || missing+=(binutils)
    { command -v chromium && command -v chromedriver; } >/dev/null || missing+=(chromium chromium-driver)
    python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3 python3-venv)
    if [ ${#missing[@]} -gt 0 ] && command -v apt-get >/dev/null; then
        echo "installing ${missing[*]}"
        $sudo apt-get update -qq
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}"
    fi
    # Installs the tools of other languages one by one, so that a missing package does not prevent others.
    local each tool updated=
    for each in "luajit luajit" "go golang-go" "pkg-config pkg-config" "gfortran gfortran" "mcs mono-mcs mono-runtime" \
        "/usr/share/java/ecj.jar libecj-java"; do
        read -r tool each <<<"$each"
        if ! { command -v "$tool" >/dev/null || [ -e "$tool" ]; } && command -v apt-get >/dev/null; then
            echo "installing $each"
            [ -n "$updated" ] || $sudo apt-get update -qq
            updated=yes
            # shellcheck disable=SC2086 # the packages are words
            $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $each
        fi
    done
    if ! { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1 && command -v rustup >/dev/null; then
        rustup component add rustfmt clippy
    fi
}

# finish LANES: prints the last lines; fails if a stage or a lane failed.
finish() {
    local passed failed
    passed=$(grep -c '^passed' "$logs/outcomes")
    failed=$(grep -c '^FAILED' "$logs/outcomes")
    echo "$SECONDS s in all"
    cat "$logs/not_run" "$logs/failed"
    echo "$passed passed, $failed failed, $(wc -l <"$logs/not_run") not run"
    [ "$(grep -c '^ended' "$logs/outcomes")" -eq "$1" ] || { echo "FAILED: a lane has died"; exit 1; }
    [ "$failed" -eq 0 ]
}
