# The second call, at most 130 s: the benchmark at 0.6B; all tests of the trainer on a device, and beside them the
# compiled probe; one experiment if there is time. Needs cudnn_frontend.whl beside it (untracked).
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
E=/tmp/etude/bin/python; [ -x $E ] || E=python3
python3 -m zipfile -e cudnn_frontend.whl .cudnn_frontend && export PYTHONPATH=$PWD/.cudnn_frontend:$PWD
run() { t=$1; shift; date +%T; timeout $t "$@" 2>&1 | grep -v -i "userwarn\|_warn_once\|node.target" | cut -c1-230 | tail -45; }
run 70 python3 -m etude.bench.train --json --shapes qwen3-0.6b
workers=$($E -c "import xdist; print('-n 4')" 2>/dev/null)
run 60 python3 probe_cudnn.py compiled > probe_compiled.log &
run 85 $E -m pytest -q --no-header -p no:cacheprovider $workers tests/train/test_on_cuda.py
wait; cat probe_compiled.log
[ $SECONDS -lt 110 ] && TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 \
    run 30 python3 -m etude.bench.train --shapes qwen3-0.6b --layouts 8x2048 --alone
date +%T
