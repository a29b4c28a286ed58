#!/bin/sh
# Étude No. 1, from the sources to the figures. What is done is not done again: after a kill, the same command goes on.
#   examples/etude-1/run.sh [model|sdists|corpus|sessions|tasks|sft|rl|measure]...     (all, in this order)
#   examples/etude-1/run.sh seeds         after sft: rl by the seeds 0, 1 and 2 side by side (SEEDS), and their mean beside sft
#   examples/etude-1/run.sh ablations     after these: rl with one thing changed, seven times
# SEED=1 examples/etude-1/run.sh rl measure: rl from the same weights with another seed
set -eu
cd "$(dirname "$0")"
ETUDE=${ETUDE:-etude}
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-../../models/smollm2-135m}
JOBS=${JOBS:-$(nproc)}
SEED=${SEED:-0}
HELDOUT=${HELDOUT:-450} # tasks
TASKS=${TASKS:-700}     # to train on
SFT=data/sft
RL=data/rl-$SEED
PYTHONPATH=$(cd ../.. && pwd)
export PYTHONPATH
mkdir -p data/logs

sources() { # the files of a use in repositories.txt
    awk -v use="$1" '$1 == use { print "data/sdists/" $2 }' repositories.txt
}

model() { # SmolLM2's own chat template knows no tools
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

heldout_tasks() {
    # shellcheck disable=SC2046
    "$ETUDE" tasks build --heldout $(sources heldout) --kinds token --limit "$HELDOUT" --jobs "$JOBS" --out data/tasks --json
}

train_tasks() {
    # shellcheck disable=SC2046
    "$ETUDE" tasks build $(sources train) --kinds token --limit $((HELDOUT + TASKS)) --jobs "$JOBS" --out data/tasks --json
}

tasks() { # the held-out ones first, so that each repository has its share
    heldout_tasks && train_tasks
}

sft() {
    "$ETUDE" run sft.toml --dir "$SFT" --no-dash --json || return
    [ -e data/sft-model ] || "$ETUDE" weights export "$SFT" data/sft-model
}

rl() {
    # what every seed begins with was evaluated at the end of sft
    ${EXEC:-} "$ETUDE" run rl.toml --dir "$RL" --no-dash --json --set seed="$SEED" --set eval.before=false \
        ${CONCURRENCY:+--set harness.concurrency="$CONCURRENCY"}
}

seeds() { # those on one GPU want NVIDIA's Multi-Process Service, and fewer sessions each (README.md)
    begun='' runs='' broken=''
    trap 'kill $begun' INT TERM # which they would not hear of
    for seed in ${SEEDS:-0 1 2}; do
        runs="$runs data/rl-$seed"
        EXEC=exec CONCURRENCY=${CONCURRENCY:-40} SEED=$seed RL=data/rl-$seed rl >"data/logs/rl-$seed.log" 2>&1 &
        begun="$begun $!"
    done
    for process in $begun; do
        wait "$process" || broken=yes
    done
    [ -z "$broken" ] || { tail -n 2 data/logs/rl-*.log; return 1; }
    for run in $SFT $runs; do
        "$ETUDE" eval "$run" --samples "${SAMPLES:-8}" --json || return
    done
    # shellcheck disable=SC2086
    "$ETUDE" compare "$SFT" $runs --json
}

measure() { # version 0 of sft is the base, 1 what mid-training made of it, 2 what sessions did
    "$ETUDE" eval "$SFT" --version 0 --json # one attempt at temperature 0, as after each stage
    "$ETUDE" compare "$SFT@0" "$SFT@2" --json
    "$ETUDE" compare "$SFT@2" "$RL" --json
    "$ETUDE" eval "$SFT" --samples "${SAMPLES:-8}" --json
    "$ETUDE" eval "$RL" --samples "${SAMPLES:-8}" --json
    "$ETUDE" compare "$SFT" "$RL" --json # several at temperature 1
}

ablations() {
    variant synchronous --set stage.rl.max_lag=0 --set stage.rl.reorder_window=1 &&
        variant lag-1 --set stage.rl.max_lag=1 &&
        variant lag-4 --set stage.rl.max_lag=4 &&
        variant lag-16 --set stage.rl.max_lag=16 &&
        variant in-turn --set stage.rl.fresh_frac=1.0 &&
        variant by-turn --set stage.rl.advantage=by_turn || return
    # one step, at the rate with which it begins, is as good as none
    "$ETUDE" run sft.toml --dir data/sft-alone --no-dash --json --set stage.midtrain.steps=1 || return
    [ -e data/sft-alone-model ] || "$ETUDE" weights export data/sft-alone data/sft-alone-model || return
    variant without-midtrain --set model.path=data/sft-alone-model
}

variant() { # NAME, and what it changes
    name=$1 && shift
    "$ETUDE" run rl.toml --dir "data/$name" --no-dash --json --set seed="$SEED" --set eval.before=false --set eval.every_steps=0 \
        ${CONCURRENCY:+--set harness.concurrency="$CONCURRENCY"} "$@" &&
        "$ETUDE" eval "data/$name" --samples "${SAMPLES:-8}" --json &&
        "$ETUDE" compare "$RL" "data/$name" --json
}

for step in ${*:-model sdists corpus sessions tasks sft rl measure}; do
    began=$(date +%s)
    "$step" >"data/logs/$step.log" 2>&1 || { tail -n 20 "data/logs/$step.log" >&2; exit 1; }
    echo "$step: $(($(date +%s) - began)) s: $(tail -n 1 "data/logs/$step.log")" | tee -a data/logs/all.log
done
