#!/usr/bin/env bash
# Makes the virtual environment of a CPU installation. Usage: deploy/setup.sh VENV STAMP   (called by `make`)
#
#   PYTHON           interpreter to use (default python3; 3.11 or newer)
#   TORCH_INDEX_URL  package index to take torch from. The default index serves a CUDA build on Linux, which works on a CPU too but
#                    is several GB larger; PyTorch's install page names its CPU index.
set -euo pipefail
venv=$1 stamp=$2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

step() { printf '\n\033[1m[%s/4] %s\033[0m\n' "$1" "$2"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || fail "$python is not Python 3.11 or newer; name one: make PYTHON=python3.12 …"
"$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python has no venv module (on Debian and Ubuntu: apt-get install python3-venv)"

cd "$root"
step 1 "virtual environment in $venv"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --no-input)

step 2 "torch"
"${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep -o 'torch==[0-9.]*' pyproject.toml | head -1)"

# SGLang's wheel pins CUDA-only packages; its CPU dependencies are the extra `cpu` of pyproject.toml.
step 3 "SGLang and torchvision, without their pinned dependencies"
"${pip[@]}" --no-deps "$(grep -o 'sglang==[0-9.]*' pyproject.toml | head -1)" torchvision==0.28.0

echo 'pip may now list, in red, what SGLang asks for and does not find: its wheel names CUDA packages and torch 2.14.1. A CPU worker'
echo 'runs without them and with torch 2.13.0; `make test` compares its answers with those of transformers.'
step 4 "what a CPU worker, the router and the tests import (about 120 packages)"
"${pip[@]}" --constraint deploy/constraints-cpu.txt --editable '.[cpu,dev,calibrate]'

touch "$stamp"
printf '\nsetup: done\n'
