#!/usr/bin/env bash
# Set up the environment, check the style, run the tests. Options go to pytest: ./run_tests.sh -k config
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$here"
[[ "$(uname -sm)" != "Linux x86_64" ]] || add_tpu_compiler # a small step is compiled for a TPU
add_extras
python -m ruff check .
python -m ruff format --check .

tests() { # 5 is what pytest says where no test was asked for: with -k, of one of the two groups
    python -m pytest "$@" || [[ $? == 5 ]]
}

(unset PJRT_DEVICE && tests "$@")
PJRT_DEVICE=CPU tests tests/xla "$@" # in a process of their own: torch_xla changes torch for all of it
