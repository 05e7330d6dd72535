#!/usr/bin/env bash
# From a bare clone to a fine-tuned Whisper: sets up .venv, fetches demo weights and speech, trains on this machine
# (CPU or every GPU), prints the word error rate before and after. Further words go to the training command.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
python scripts/fetch_demo.py
if [ -e runs/demo/recipe.yaml ]; then
    if [ -e runs/demo/results.json ]; then
        kept="runs/demo-$(date +%Y%m%d-%H%M%S)"
        mv runs/demo "$kept"
        echo "The earlier demo run is kept in $kept"
    else
        set -- --run.resume auto "$@"
    fi
fi
accelerate launch src/train.py "$@"
