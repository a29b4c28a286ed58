# The second call: tests of the trainer on a device, then the benchmark. At most 150 s.
# Needs cudnn_frontend.whl beside it (untracked; it travels with the working tree).
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
E=/tmp/etude/bin/python; [ -x $E ] || E=python3
python3 -m zipfile -e cudnn_frontend.whl .cudnn_frontend && export PYTHONPATH=$PWD/.cudnn_frontend:$PWD
run() { t=$1; shift; date +%T; timeout $t "$@" 2>&1 | grep -v -i "userwarn\|_warn_once\|node.target" | cut -c1-230 | tail -45; }
run 70 $E -m pytest -q --no-header -p no:cacheprovider -x tests/train/test_on_cuda.py \
    -k "attention or finite or bf16 or curve"
run 150 python3 -m etude.bench.train --json
date +%T
