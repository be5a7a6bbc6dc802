#!/bin/sh
# Keeps the virtual environment in .venv; make calls it, from the root of the repository.
#
#   scripts/environment.sh install EXTRA   make .venv work, with equipoise[EXTRA] as constrained
#   scripts/environment.sh healthy         print "yes" if .venv works for this checkout
set -eu

VENV=.venv
OLDEST="3, 11"

new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info < ($OLDEST))" >/dev/null 2>&1
}

can_make_venv() {
    "$1" -c "import ensurepip, venv" >/dev/null 2>&1
}

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

# $PYTHON if given, else the first candidate that is new enough and can make an environment.
choose_python() {
    too_bare=
    for candidate in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3 python}; do
        new_enough "$candidate" || continue
        if can_make_venv "$candidate"; then
            echo "$candidate"
            return
        fi
        too_bare="$too_bare $candidate"
    done
    if [ -n "$too_bare" ]; then
        fail "Making .venv needs a Python with the modules venv and ensurepip." \
            "Found without them:$too_bare." \
            "Install them (Debian and Ubuntu: sudo apt install python3-venv), then run make again."
    fi
    fail "Making .venv needs Python 3.11 or newer." \
        "Tried, and found none that is:${PYTHON:+ }${PYTHON:- python3.14 to python3.11, python3, python}." \
        "Install one (Debian and Ubuntu: sudo apt install python3 python3-venv; macOS: brew install python)," \
        "or name one: make PYTHON=/path/to/python."
}

has_pip() {
    new_enough "$VENV/bin/python" && "$VENV/bin/python" -c "import pip" >/dev/null 2>&1
}

# True if .venv has pip and its equipoise is this checkout: not so after an interrupted set-up,
# an upgrade of the system's Python, or a move of the folder.
healthy() {
    has_pip && "$VENV/bin/python" - >/dev/null 2>&1 <<'EOF'
from importlib.util import find_spec
from pathlib import Path

Path(find_spec("equipoise").origin).relative_to(Path.cwd())
EOF
}

install() {
    if ! has_pip; then
        python=$(choose_python)
        echo "Making .venv with $python"
        "$python" -m venv --clear "$VENV"
    fi
    echo "Installing equipoise[$1] into .venv (the first time takes minutes: torch is large)"
    # Two names: older versions of pip read the first for the build too, newer ones the second.
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        PIP_DISABLE_PIP_VERSION_CHECK=1 \
        "$VENV/bin/python" -m pip install --editable ".[$1]"
}

case "${1:-}" in
    install) install "$2" ;;
    healthy) if healthy; then echo yes; fi ;;
    *) fail "The first argument must be 'install' or 'healthy', got '${1:-}'." ;;
esac
