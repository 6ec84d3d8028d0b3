#!/usr/bin/env bash
# Most training traces follow the same wrong rule; eight trusted traces show the right one. Trains SmolLM2-135M
# on all traces (SFT), scores them along the gradient of the trusted ones, trains on the quarter of highest utility, and
# evaluates both: on all GPUs, or on two CPU processes, where it takes four minutes.
#   bash launch_scripts/wrong_traces.sh [OVERRIDES]     such as schedule.num_steps=20; of both trainings
# Every command is printed before it runs, as one would type it with .venv activated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
folder=runs/wrong_traces
for ((number = 2; ; number++)); do
    [ -e "$folder" ] || break
    folder=runs/wrong_traces_$number
done
data=$folder/data
ranks=()
accelerator=${DS_ACCELERATOR:-$(python -P launch_scripts/gpus.py)}
if [ "$accelerator" = cpu ]; then
    export DS_ACCELERATOR=cpu
    ranks=(--num_accelerators 2)
fi
run() {
    echo
    echo "\$ $*"
    "$@"
}
launch() {
    local port
    port=$(python -c "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])")
    run deepspeed --quiet --master_port "$port" "${ranks[@]}" --module vcore_ds "$@"
}
paths=("data.train_path=$data/mixture.jsonl" "data.probe_path=$data/trusted.jsonl")
evaluate=(vcore-ds eval --tasks "math500=$data/problems.jsonl" --temperature 0 --max-new-tokens 128 --batch-size 64)

run python launch_scripts/quickstart_data.py runs/quickstart_data
run python -m launch_scripts.wrong_traces write "$data"
launch train wrong_traces.yaml methods/sft.yaml "${paths[@]}" "$@" "run.output_dir=$folder/sft"
launch score "$folder/sft" "data.probe_path=$data/trusted.jsonl" --output "$folder/scores"
launch train wrong_traces.yaml methods/sft.yaml "${paths[@]}" "$@" "run.output_dir=$folder/selection" \
    "data.keep.scores=$folder/scores" data.keep.top=0.25
run "${evaluate[@]}" --output "$folder/evaluation_before" runs/quickstart_data/SmolLM2-135M-Instruct
run "${evaluate[@]}" --output "$folder/evaluation_sft" "$folder/sft"
run "${evaluate[@]}" --output "$folder/evaluation_selection" "$folder/selection"
run vcore-ds compare "$folder/evaluation_sft" "$folder/evaluation_selection"
run python -m launch_scripts.wrong_traces show "$data/problems.jsonl" "before=$folder/evaluation_before" \
    "sft=$folder/evaluation_sft" "quarter of highest utility=$folder/evaluation_selection"
