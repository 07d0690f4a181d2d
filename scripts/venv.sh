#!/usr/bin/env bash
# Make .venv, or bring it up to date; do nothing if it is. PYTHON=... chooses the interpreter it is made from.
#
# The stamp in it says what it was made from. It is removed before a change and written after, so that a venv without
# one is half-made and is made anew, and two of these scripts at once wait for each other.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

venv=.venv
stamp=$venv/tenfold-stamp
describe='import platform, sys; print(platform.python_implementation(), platform.python_version())'
recent='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'

fail() {
    echo "venv.sh: $*" >&2
    exit 1
}

# The first interpreter that is new enough and can make a venv. 3.11 goes first: it is what the tests run on.
find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        "$PYTHON" -c "$recent" 2>/dev/null || fail "PYTHON=$PYTHON is not a Python 3.11 or later with venv and ensurepip"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13 python3.14 python; do
        if "$candidate" -c "$recent" 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later with venv and ensurepip was found: install one or set PYTHON=/path/to/python3"
}

# What a venv of this interpreter has to be made from. The path counts because a venv that was moved does not work.
wanted() {
    "$1" -c "$describe"
    "$1" -c 'import hashlib, os, sys
digest = hashlib.sha256(os.fsencode(os.getcwd()))
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        digest.update(hashlib.sha256(file.read()).digest())
print(digest.hexdigest())' pyproject.toml constraints.txt
}

# An interpreter that is not named is the one the venv has: another python3 on the PATH is no reason to make it anew.
is_current() {
    [[ -x $venv/bin/python && -f $stamp ]] && [[ "$(wanted "${PYTHON:-$venv/bin/python}" 2>/dev/null)" == "$(<"$stamp")" ]]
}

if [[ -n ${PYTHON:-} ]]; then
    find_python >/dev/null
fi
if is_current; then
    exit 0
fi

# The lock is on this file, so that there is none to leave behind. Where there is no flock, do not run two at once.
if command -v flock >/dev/null; then
    exec 9<scripts/venv.sh
    flock 9
    if is_current; then
        exit 0
    fi
fi

python=$(find_python)
if [[ -f $stamp ]] && [[ "$("$venv/bin/python" -c "$describe" 2>/dev/null)" == "$(head -n 1 "$stamp")" ]] &&
    [[ -z ${PYTHON:-} || "$("$python" -c "$describe")" == "$(head -n 1 "$stamp")" ]]; then
    echo "venv.sh: bringing .venv up to date with pyproject.toml and constraints.txt" >&2
    rm -f "$stamp"
else
    echo "venv.sh: making .venv with $("$python" -c "$describe"), which takes a few minutes" >&2
    rm -f "$stamp"
    "$python" -m venv --clear "$venv"
fi

# torch goes first and by itself: some machines hold one build of exactly this version, and nothing may choose another.
torch=$(grep -E '^torch==' constraints.txt) || fail "constraints.txt does not pin torch"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet install)
"${pip[@]}" -c constraints.txt "$torch" || fail "installing $torch failed: see above"
"${pip[@]}" -c constraints.txt -e '.[dev]' || fail "installing tenfold and its development tools failed: see above"

wanted "$venv/bin/python" >"$stamp.new"
mv "$stamp.new" "$stamp"
