#!/usr/bin/env bash
# From raw text to an answer: pretrains a gMLP and a BERT alike on TEXT, trains each to search with three seeds, and scores
# them on SQuAD's development passages beside BM25 and themselves as exported. Every command is printed, and can be typed
# by hand. Run again, it goes on where it was; at its end it prints the tables again.
#
#   bash launch/search_from_text.sh 'TEXT/*.jsonl.gz' SQUAD/train-v1.1.json SQUAD/dev-v1.1.json [section.field=value ...]
#
# The fields change both pretrainings. QUESTION="..." asks another one, OPTIONS="--epochs 2" is for launch/search.py, and
# NAME=try keeps everything of a trial apart: what is done is not done again, whatever the fields say.
set -euo pipefail
[[ -n ${1:-} && -n ${2:-} && -n ${3:-} ]] || { echo "usage: $0 TEXT SQUAD_TRAIN SQUAD_DEV [section.field=value ...]" >&2 && exit 2; }
text=$1 train=$2 dev=$3
name=${NAME:-search}
question=${QUESTION:-How large is the Amazon rainforest?}
trap 'exit 130' INT TERM # a pretraining that is stopped saves and leaves with 0
PS4='$ '
set -x

[[ -f data/$name/tokenizer/tokenizer.model ]] ||
    python data_prep/train_tokenizer.py --input "$text" --vocab-size 8192 --sample-bytes 20000000 --output "data/$name/tokenizer"
python data_prep/tokenize_corpus.py --input "$text" --tokenizer "data/$name/tokenizer" --sequence-length 128 \
    --heldout-fraction 0.01 --output "data/$name/shards"
for model in gmlp bert; do
    python launch/pretrain.py --config "compare_$model" "data.shards=data/$name/shards" "name=${name}_$model" "${@:4}"
    [[ -d exports/${name}_$model ]] ||
        python launch/export.py --run "outputs/${name}_$model" --output "exports/${name}_$model"
done
for model in gmlp bert; do
    # shellcheck disable=SC2086 - OPTIONS are words
    python launch/search.py --model "exports/${name}_$model" --pairs "$train" --dev "$dev" --output "outputs/$name/$model" \
        --seeds 3 --ask "$question" ${OPTIONS:-}
done
