#!/bin/sh
# Étude No. 1, from the sources to the figures. Finished steps are skipped: after a kill, the same command continues.
#   examples/etude-1/run.sh [model|sdists|corpus|sessions|tasks|sft|rl|measure]...     (all, in this order)
#   examples/etude-1/run.sh seeds         after sft: rl with the seeds 0, 1 and 2 (SEEDS), and their mean against sft
#   examples/etude-1/run.sh ablations     after these: rl with one thing changed, each against seed SEED
# SEED=1 examples/etude-1/run.sh rl measure: rl from the same weights with another seed
# SETS='--set harness.max_turns=8' changes every run except sft-alone; LIMIT_S=600 stops each rl run after ten minutes (README.md)
set -eu
cd "$(dirname "$0")"
ETUDE=${ETUDE:-etude}
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-../../models/smollm2-135m}
JOBS=${JOBS:-$(nproc)}
SEED=${SEED:-0}
HELDOUT=${HELDOUT:-450} # tasks
NOVEL=${NOVEL:-250}     # tasks of repositories by which no recipe was chosen
TASKS=${TASKS:-700}     # tasks to train on
SETS=${SETS:-}
SFT=data/sft
RL=data/rl-$SEED
PYTHONPATH=$(cd ../.. && pwd)
export PYTHONPATH
mkdir -p data/logs

sources() { # the files with a given use in repositories.txt
    awk -v use="$1" '$1 == use { print "data/sdists/" $2 }' repositories.txt
}

model() { # SmolLM2's own chat template does not support tools
    mkdir -p data/model
    for file in config.json generation_config.json tokenizer.json tokenizer_config.json model.safetensors; do
        ln -sf "$(readlink -f "$MODEL/$file")" data/model/
    done
    cp chat_template.jinja data/model/
}

sdists() {
    "$PYTHON" fetch.py repositories.txt data/sdists
}

corpus() {
    [ -e data/corpus.jsonl ] || "$PYTHON" corpus.py repositories.txt --sdists data/sdists --out data/corpus.jsonl
}

sessions() {
    "$PYTHON" sessions.py repositories.txt --sdists data/sdists --model data/model --out data/sessions --jobs "$JOBS"
}

build_tasks() { # LIMIT [--heldout|--novel] SOURCE...
    limit=$1 && shift
    "$ETUDE" tasks build --kinds token --limit "$limit" --jobs "$JOBS" --out data/tasks --json "$@"
}

# shellcheck disable=SC2046
eval_tasks() {
    build_tasks "$HELDOUT" --heldout $(sources heldout) && build_tasks $((HELDOUT + NOVEL)) --novel $(sources novel)
}

# shellcheck disable=SC2046
train_tasks() {
    build_tasks $((HELDOUT + NOVEL + TASKS)) $(sources train)
}

tasks() { # those for evaluation first, so that each repository has its share
    eval_tasks && train_tasks
}

sft() {
    # shellcheck disable=SC2086
    "$ETUDE" run sft.toml --dir "$SFT" --no-dash --json $SETS || return
    [ -e "$SFT-model" ] || "$ETUDE" weights export "$SFT" "$SFT-model"
}

rl() { # [--set KEY=VALUE]...; the weights that every seed starts from were evaluated at the end of sft
    # shellcheck disable=SC2086
    ${LIMIT_S:+timeout --foreground "$LIMIT_S"} "$ETUDE" run rl.toml --dir "$RL" --no-dash --json \
        --set seed="$SEED" --set eval.before=false $SETS "$@" || [ $? = 124 ] # the limit
}

side_by_side() { # reads lines of NAME [--set KEY=VALUE]...
    xargs -L 1 -P "${RUNS:-3}" ./run.sh variant
}

variant() { # rl in data/NAME with something changed, and several attempts at each held-out task
    RL=data/$1 && shift
    rl --set harness.concurrency="${CONCURRENCY:-40}" --set engine.max_num_seqs=32 "$@" || return
    "$ETUDE" eval "$RL" --samples "${SAMPLES:-8}" --json
}

seeds() {
    runs=''
    for seed in ${SEEDS:-0 1 2}; do
        runs="$runs data/rl-$seed"
        echo "rl-$seed --set seed=$seed"
    done >data/seeds.txt
    side_by_side <data/seeds.txt || return
    "$ETUDE" eval "$SFT" --samples "${SAMPLES:-8}" --json || return
    # shellcheck disable=SC2086
    printf '%s\n' "$SFT" $runs |
        xargs -P "${RUNS:-3}" -I RUN "$ETUDE" eval RUN --split novel --samples "${SAMPLES:-8}" --json || return
    for split in heldout novel; do
        # shellcheck disable=SC2086
        "$ETUDE" compare "$SFT" $runs --split "$split" --json || return
    done
}

sft_alone() { # one midtrain step at the initial learning rate is as good as none; SETS may contain keys of rl, which sft.toml does not have
    (SFT=data/sft-alone SETS="--set stage.midtrain.steps=1 --set eval.before=false" && sft)
}

ablations() { # each against the seed that it is a variant of
    sft_alone || return
    side_by_side <<END || return
synchronous --set stage.rl.max_lag=0 --set stage.rl.reorder_window=1
lag-1 --set stage.rl.max_lag=1
lag-4 --set stage.rl.max_lag=4
lag-16 --set stage.rl.max_lag=16
in-turn --set stage.rl.fresh_frac=1.0
without-midtrain --set model.path=data/sft-alone-model
by-turn --set stage.rl.advantage=by_turn
END
    for name in synchronous lag-1 lag-4 lag-16 in-turn by-turn without-midtrain; do
        "$ETUDE" compare "$RL" "data/$name" --json || return
    done
}

measure() { # version 0 of sft is the base model, 1 the result of midtrain, 2 that of sft
    "$ETUDE" eval "$SFT" --version 0 --json # one attempt at temperature 0, as after each stage
    "$ETUDE" compare "$SFT@0" "$SFT@2" --json
    "$ETUDE" compare "$SFT@2" "$RL" --json
    "$ETUDE" eval "$SFT" --samples "${SAMPLES:-8}" --json
    "$ETUDE" eval "$RL" --samples "${SAMPLES:-8}" --json
    "$ETUDE" compare "$SFT" "$RL" --json # several at temperature 1
}

if [ "${1:-}" = variant ]; then # called by side_by_side
    shift
    variant "$@" >"data/logs/$1.log" 2>&1 || { tail -n 5 "data/logs/$1.log" >&2; exit 1; }
    exit
fi
for step in ${*:-model sdists corpus sessions tasks sft rl measure}; do
    began=$(date +%s)
    "$step" >"data/logs/$step.log" 2>&1 || { tail -n 20 "data/logs/$step.log" >&2; exit 1; }
    echo "$step: $(($(date +%s) - began)) s: $(tail -n 1 "data/logs/$step.log")" | tee -a data/logs/all.log
done
