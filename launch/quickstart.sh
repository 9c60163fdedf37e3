#!/usr/bin/env bash
# From a fresh clone to a trained model: sets up what is missing, then trains SmolLM2-135M-Instruct to
# add. Arguments go to submit.py: bash launch/quickstart.sh --run.seed 1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

printf 'slurm_grpo quickstart\n'
setup
cd "$REPO"
exec "$PYTHON" launch/submit.py configs/quickstart.yaml "$@"
