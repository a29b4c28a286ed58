# The second call: the benchmark (75 s), tests of the trainer on a device (60 s), one experiment (20 s).
# Needs cudnn_frontend.whl beside it (untracked; it travels with the working tree).
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
E=/tmp/etude/bin/python; [ -x $E ] || E=python3
python3 -m zipfile -e cudnn_frontend.whl .cudnn_frontend && export PYTHONPATH=$PWD/.cudnn_frontend:$PWD
run() { t=$1; shift; date +%T; timeout $t "$@" 2>&1 | grep -v -i "userwarn\|_warn_once\|node.target" | cut -c1-230 | tail -45; }
run 100 python3 -m etude.bench.train --json
run 80 $E -m pytest -q --no-header -p no:cacheprovider tests/train/test_on_cuda.py -k "attention or finite or bf16"
TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 run 30 python3 -m etude.bench.train --shapes qwen3-0.6b --layouts 8x2048 --alone
date +%T
