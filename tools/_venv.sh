# Sourced by the tools: makes .venv and installs into it what is asked for. Prints what it does; can be run again.
#   use_venv EXTRA        e.g. use_venv all, use_venv dev
#   help_if_asked "$@"    before that: help installs nothing

say() { printf '[%s] %s\n' "$(basename "$0")" "$*"; }

die() { printf '[%s] %s\n' "$(basename "$0")" "$*" >&2; exit 2; }

# The head of the tool, and what its `program` says of its options, where that can be started as things are.
help_if_asked() {
    local word
    for word in "$@"; do
        case $word in
            --) return ;;
            -h | --help)
                sed -n '2,${/^#/!q; s/^# \{0,1\}//; p}' "$0"
                if [ -n "${program+set}" ]; then
                    echo
                    "${program[@]}" --help 2>/dev/null || say "its options are shown once a first call has made .venv"
                fi
                exit 0
                ;;
        esac
    done
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
    local candidate seen
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" && { echo "$PYTHON"; return; }
        die "PYTHON=$PYTHON is not Python 3.10 or newer: $("$PYTHON" --version 2>&1 | tail -n 1)"
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        new_enough "$candidate" && { echo "$candidate"; return; }
    done
    seen=$(python3 --version 2>/dev/null) || seen="not there"
    die "Python 3.10 or newer was not found (python3 is $seen): install it, or name it with PYTHON=/path/to/python3"
}

use_venv() {
    local extra=$1 want have stamp=.venv/.installed-$1
    if [ ! -x .venv/bin/python ] || ! new_enough .venv/bin/python; then
        local python
        python=$(find_python)
        say "making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv || die "python3 -m venv failed: on Debian and Ubuntu install the package python3-venv"
    fi
    want=$(cat pyproject.toml tools/constraints.txt | cksum)
    have=$(cat "$stamp" 2>/dev/null || true)
    if [ "$want" != "$have" ]; then
        say "installing miles-hpc[$extra] into .venv"
        # An older pip, as the first releases of Python 3.10 bring, cannot install in place from a pyproject.toml.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=21.3'
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt -e ".[$extra]"
        printf '%s' "$want" >"$stamp"
    fi
    # Where PYTHONDONTWRITEBYTECODE is set, each of a run's processes would compile the package for itself.
    .venv/bin/python -m compileall -q miles_hpc >/dev/null 2>&1 || true
}
