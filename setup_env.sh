#!/usr/bin/env bash
# The environment of quickstart.sh and run_tests.sh, which source this file: the active virtual environment, else
# .venv beside this file, made where it is missing; requirements.txt is installed where it is not yet.
#
#     ./setup_env.sh             set up, and say how to activate the environment
#     ./setup_env.sh cpu         the same
#     ./setup_env.sh gpu         and look for CUDA GPUs
#     ./setup_env.sh tpu         and add libtpu, the TPU's library, and look for chips; starts no runtime
#     ./setup_env.sh --python    print a Python that the project runs on, and do nothing else
#     ./setup_env.sh --extras    set up, and add requirements_extras.txt: published WFSTs, rescoring by a language model
#     ./setup_env.sh --tpu_compiler    set up, and add the compiler that tpu_compile_check.py needs (Linux on x86-64)
#     PYTHON=/path/to/python3.12 ./setup_env.sh    make .venv with this Python
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

stop() {
    printf '%s\n' "$@" >&2
    exit 1
}

version_of() { # 3.11, or nothing where the command does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

suits() {
    [[ "$(version_of "$1")" == 3.11 || "$(version_of "$1")" == 3.12 ]]
}

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        suits "$PYTHON" || stop "PYTHON=$PYTHON is Python $(version_of "$PYTHON"): Python 3.11 or 3.12 is needed."
        printf '%s\n' "$PYTHON"
        return
    fi
    local name found=""
    for name in python3.11 python3.12 python3 python; do
        if suits "$name"; then
            command -v "$name"
            return
        fi
        found="$found${found:+, }$name: $(version_of "$name")"
    done
    stop "Python 3.11 or 3.12 is needed, and none was found ($found)." \
        "Install one (https://www.python.org/downloads/), or name it: PYTHON=/path/to/python3.12 $0"
}

has_pip() {
    "$1" -m pip --version >/dev/null 2>&1 || { "$1" -m ensurepip && "$1" -m pip --version; } >/dev/null 2>&1
}

make_environment() { # a directory; what a killed run left there is replaced
    local base
    base="$(find_python)"
    "$base" -c 'import venv, ensurepip' 2>/dev/null || stop \
        "$base cannot make a virtual environment: its venv module is missing." \
        "On Debian and Ubuntu: sudo apt install python$(version_of "$base")-venv"
    echo "making $1 with $base"
    "$base" -m venv --clear "$1"
}

installed() { # whether requirements.txt is: a copy of the one that was installed last lies in the environment
    cmp -s "$here/${2:-requirements.txt}" "$1/${2:-requirements.txt}.installed"
}

check_active() {
    suits "$1/bin/python" || stop \
        "The active virtual environment, $1, has Python $(version_of "$1/bin/python")." \
        "Python 3.11 or 3.12 is needed: leave it (deactivate) and run this again, or activate another."
    installed "$1" || has_pip "$1/bin/python" || stop "The active virtual environment, $1, has no pip."
}

check_own() {
    local version
    version="$(version_of "$1/bin/python")"
    if [[ -z "$version" ]]; then
        make_environment "$1"
    elif ! suits "$1/bin/python"; then
        stop "$1 has Python $version; Python 3.11 or 3.12 is needed: remove it and run this again."
    elif ! installed "$1" && ! has_pip "$1/bin/python"; then
        make_environment "$1"
    fi
}

set_up() {
    local environment="${VIRTUAL_ENV:-}"
    if [[ -n "$environment" ]]; then
        check_active "$environment"
    else
        environment="$here/.venv"
        check_own "$environment"
    fi
    export VIRTUAL_ENV="$environment" PATH="$environment/bin:$PATH"
    unset PYTHONHOME
    if ! installed "$environment"; then
        echo "installing requirements.txt into $environment (a few GB the first time)"
        python -m pip install --disable-pip-version-check --quiet --requirement "$here/requirements.txt"
        cp "$here/requirements.txt" "$environment/requirements.txt.installed"
    fi
}

add_extras() { # published WFSTs, rescoring
    installed "$VIRTUAL_ENV" requirements_extras.txt && return
    echo "installing requirements_extras.txt into $VIRTUAL_ENV"
    python -m pip install --disable-pip-version-check --quiet --requirement "$here/requirements_extras.txt"
    cp "$here/requirements_extras.txt" "$VIRTUAL_ENV/requirements_extras.txt.installed"
}

# jaxlib and torch_xla each bring their own XLA, so that the compiler is in an environment inside the environment.
# Versions: those that torch_xla 2.9.0 is built for.
add_tpu_compiler() {
    local folder="$VIRTUAL_ENV/tpu_compiler"
    [[ "$(uname -sm)" == "Linux x86_64" ]] || stop "The TPU's compiler is there for Linux on x86-64 only."
    [[ -f "$folder/installed" ]] && return
    echo "installing the TPU's compiler into $folder (about 1 GB)"
    python -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet \
        jax==0.7.1 jaxlib==0.7.1 libtpu==0.0.21
    touch "$folder/installed"
}

show_gpus() {
    python - <<'PYTHON' || stop "PyTorch sees no CUDA GPU: look at what nvidia-smi says; the environment is ready."
import sys, torch
for i in range(torch.cuda.device_count()):
    print(f"GPU {i}: {torch.cuda.get_device_name(i)}, bf16: {'yes' if torch.cuda.is_bf16_supported() else 'no'}")
sys.exit(not torch.cuda.is_available())
PYTHON
}

add_tpu() {
    [[ "$(uname -sm)" == "Linux x86_64" ]] || stop "torch_xla is there for Linux on x86-64 only."
    python -c 'import importlib.metadata as m; m.version("libtpu")' 2>/dev/null || {
        echo "installing libtpu"
        python -m pip install --disable-pip-version-check --quiet "torch_xla[tpu]==2.9.0"
    }
    (cd "$here" && python -c 'import sys, tpu_host as t; c = t.find_chips()[0]; print(len(c), "TPU chip(s):", *c[:1]); sys.exit(not c)') ||
        stop "This machine shows no TPU chip; the environment is ready."
}

if [[ "${BASH_SOURCE[0]}" != "$0" ]]; then
    set_up
elif [[ "${1:-}" == --python ]]; then
    find_python
elif [[ ! "${1:-cpu}" =~ ^(cpu|gpu|tpu|--tpu_compiler|--extras)$ ]]; then
    stop "$0 takes cpu, gpu, tpu, --tpu_compiler, --extras or --python, not $1"
else
    set_up
    case "${1:-cpu}" in
    gpu) show_gpus ;;
    tpu) add_tpu ;;
    --tpu_compiler) add_tpu_compiler ;;
    --extras) add_extras ;;
    esac
    echo "ready; to use it in this terminal: source \"$VIRTUAL_ENV/bin/activate\""
fi
