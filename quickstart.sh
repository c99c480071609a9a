#!/usr/bin/env bash
# From nothing to a trained and evaluated decoder on a CPU: set up the environment, simulate a data set if there is
# none, train rnn_args_quickstart.yaml, evaluate, show a short table. Run again, it goes on with a training that was
# interrupted, and repeats one that was completed.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$here"
data=data/quickstart
run=trained_models/quickstart

if [[ ! -d $data ]]; then
    echo "== simulating a data set in $data"
    # Short sentences spoken fast, so that a CPU gets through many; speech as weak as in recordings.
    python synthetic_data.py --output_dir "$data" --sessions 4 --trials 200 30 30 \
        --speaking_rate 6 --speech_variance 0.1 --min_words 2 --max_words 4
fi

option=""
if [[ -f $run/submission_test.csv ]]; then # the last file of a complete quickstart
    echo "== training again: $run holds a complete run, which is replaced"
    option=--overwrite
elif [[ -f $run/checkpoint/last_checkpoint ]]; then
    echo "== going on with the interrupted training in $run"
    option=--resume
elif [[ -d $run ]]; then
    option=--overwrite
fi
echo "== training"
python train_model.py --config_path rnn_args_quickstart.yaml $option || {
    echo "If it cannot go on, start afresh: rm -r \"$here/$run\" and ./quickstart.sh" >&2
    exit 1
}

for split in val test; do
    echo "== evaluating $split"
    python evaluate_model.py --model_path "$run" --eval_type "$split" >/dev/null
done
python quickstart_report.py "$run" "$data"
