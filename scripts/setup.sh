# Sourced by quickstart.sh and test.sh: goes to the repository's root, makes .venv once, installs requirements.txt into it.
# A torch inside the tested range that this machine's python3 already has is used instead of a download of gigabytes.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' || {
    echo "Python 3.11 or 3.12 is needed; $("$python" --version 2>&1) was found. Name another: PYTHON=python3.11 bash $0" >&2
    exit 1
}
wanted=$(sha256sum requirements.txt)
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "Setting up .venv (minutes on the first call)"
    found=$("$python" -c 'import torch; print(torch.__version__)' 2>/dev/null || true)
    rm -rf .venv
    case "$found" in
    2.11.* | 2.12.* | 2.13.*)
        echo "using the torch $found that is installed"
        "$python" -m venv --system-site-packages .venv
        grep -v '^torch==' requirements.txt > .venv/requirements.txt
        echo "torch==$found" > .venv/constraints.txt
        ;;
    *)
        "$python" -m venv .venv
        cp requirements.txt .venv/requirements.txt
        touch .venv/constraints.txt
        ;;
    esac
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt -c .venv/constraints.txt || {
        echo "The packages of requirements.txt could not be installed; is the package index reachable?" >&2
        exit 1
    }
    echo "$wanted" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
