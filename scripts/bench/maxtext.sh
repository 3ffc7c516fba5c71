#!/bin/sh
# Installs MaxText and what it needs (219 packages, 3.4 GB) into a virtual environment of its own, for
# the rows of MaxText in scripts/bench_cpu.py.
# example: scripts/bench/maxtext.sh /tmp/maxtext python3.12
#          python scripts/bench_cpu.py --only step --maxtext-python /tmp/maxtext/bin/python
set -eu
if [ $# -lt 1 ] || [ "$1" = --help ]; then
    echo "usage: scripts/bench/maxtext.sh FOLDER [PYTHON, 3.12 or newer; default python3.12]" >&2
    exit 2
fi
python=${2:-python3.12}
if ! "$python" --version >/dev/null 2>&1; then
    echo "maxtext.sh: no $python here; MaxText needs Python 3.12 or newer: give one as the second argument" >&2
    exit 1
fi
"$python" -m venv "$1"
"$1/bin/python" -m pip install --quiet 'maxtext[tpu]==0.2.4'
"$1/bin/python" -c 'from importlib.metadata import distributions, version
print("maxtext", version("maxtext"), "with", len(list(distributions())), "packages")'
