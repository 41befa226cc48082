#!/usr/bin/env bash
# About four minutes on a machine with a GPU, NVIDIA or AMD: one table, to paste where others can read it.
#
#     PYTHON=.venv/bin/python tests/gpu/one_call.sh
#
# PYTHON has the package and its test tools (`make test` makes .venv), with a build of torch for the GPU.
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
PYTHONPATH=tests:tests/lab timeout 150 "$python" -m benchmarks.gpu_table || { echo "the table ended with exit code $?"; failed=1; }
echo
echo "tests on the GPU, as far as they came in 90 s:"
timeout --signal=INT 90 "$python" -m pytest tests/gpu/test_device.py -q -n 0 --no-header -p no:cacheprovider 2>&1 | tail -3
exit "${failed:-0}"
