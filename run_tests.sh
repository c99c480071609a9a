#!/usr/bin/env bash
# Set up the environment, check the style, run the tests. Arguments go to pytest: ./run_tests.sh -k config
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$here"
python -m ruff check .
python -m ruff format --check .
python -m pytest "$@"
