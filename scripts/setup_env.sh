# Sourced by the other scripts: makes `.venv` at the repository root, installs the package into it, activates it.
#
#   . scripts/setup_env.sh
#
# Does nothing but activate when `.venv` already holds what pyproject.toml asks for. PYTHON names another interpreter
# (3.11 or newer) for a new `.venv`. Expects `set -euo pipefail` in the sourcing script.

_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_venv="$_root/.venv"

_find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "fairchem-janus needs Python 3.11 or newer; none found (set PYTHON to one)" >&2
    return 1
}

if [ ! -x "$_venv/bin/python" ]; then
    _python="$(_find_python)"
    echo "making $_venv with $("$_python" --version)" >&2
    "$_python" -m venv "$_venv"
fi

# What was asked for last time, so that an unchanged environment costs nothing.
_stamp="$_venv/.fairchem-janus-installed"
_wanted="$(cat "$_root/pyproject.toml" "$_root/scripts/setup_env.sh" | cksum) $_root"
if [ ! -f "$_stamp" ] || [ "$(cat "$_stamp")" != "$_wanted" ]; then
    echo "installing fairchem-janus into $_venv (torch first, it is the large one)" >&2
    # Separately: whatever torch build is found or already there then settles it for everything that depends on torch.
    "$_venv/bin/python" -m pip install --quiet "torch==2.13.0" >&2
    "$_venv/bin/python" -m pip install --quiet --editable "$_root[dev]" >&2
    echo "$_wanted" >"$_stamp"
fi

# shellcheck disable=SC1091
. "$_venv/bin/activate"
unset -f _find_python
unset _root _venv _python _stamp _wanted
