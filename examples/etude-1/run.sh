#!/bin/sh
# Étude No. 1, from the sources to the figures. What is done is not done again: after a kill, the same command goes on.
#   examples/etude-1/run.sh [model|sdists|tasks|sessions|train|measure]...     (all, in this order)
set -eu
cd "$(dirname "$0")"
ETUDE=${ETUDE:-etude}
PYTHON=${PYTHON:-python}
MODEL=${MODEL:-../../models/smollm2-135m}
JOBS=${JOBS:-$(nproc)}
RUN=${RUN:-data/run}
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

tasks() { # the held-out ones first, so that each repository has its share
    # shellcheck disable=SC2046
    "$ETUDE" tasks build --heldout $(sources heldout) --kinds token --limit "${HELDOUT:-224}" --jobs "$JOBS" --out data/tasks --json
    # shellcheck disable=SC2046
    "$ETUDE" tasks build $(sources train) --kinds token --limit "${TASKS:-600}" --jobs "$JOBS" --out data/tasks --json
}

sessions() {
    PYTHONPATH=$(cd ../.. && pwd) "$PYTHON" sessions.py repositories.txt --sdists data/sdists --model data/model --out data/sessions --jobs "$JOBS"
}

train() {
    "$ETUDE" run rl.toml --dir "$RUN" --no-dash --json
}

measure() { # version 0 is the base, 1 what sft made of it, the newest what rl made of that
    "$ETUDE" compare "$RUN@0" "$RUN@1" --json # one attempt at temperature 0
    "$ETUDE" compare "$RUN@1" "$RUN" --json
    "$ETUDE" eval "$RUN" --version 1 --samples "${SAMPLES:-8}" --json
    "$ETUDE" eval "$RUN" --samples "${SAMPLES:-8}" --json
    "$ETUDE" compare "$RUN@1" "$RUN" --json # several at temperature 1
}

for step in ${*:-model sdists tasks sessions train measure}; do
    began=$(date +%s)
    "$step" >"data/logs/$step.log" 2>&1 || { tail -n 20 "data/logs/$step.log" >&2; exit 1; }
    echo "$step: $(($(date +%s) - began)) s: $(tail -n 1 "data/logs/$step.log")" | tee -a data/logs/all.log
done
