#!/usr/bin/env bash
# The whole story in a few minutes on two CPU cores, on text that is already here: the prose of the installed packages.
# Every line that starts with `$` is a command that can be typed by hand.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two processes share the machine

DATA=data/demo
RUN=outputs/demo
started=$SECONDS

say() { printf '\n== %s  (%d s)\n' "$*" $((SECONDS - started)); }
run() {
    local word line='$'
    for word; do # quoted where a shell needs it, so that the line can be pasted
        [[ $word =~ ^[A-Za-z0-9_./:=,+-]+$ ]] || word=${word@Q}
        line+=" $word"
    done
    printf '%s\n' "$line"
    "$@"
}

rm -rf "$DATA" "$RUN"
mkdir -p "$DATA"

say "1/8  Gather a corpus: English prose from the installed packages' docstrings and documentation"
run python data_prep/gather_docs.py --output "$DATA/docs.jsonl"

say "2/8  Train a SentencePiece tokenizer"
run python data_prep/train_tokenizer.py --input "$DATA/docs.jsonl" --vocab-size 4096 --output "$DATA/tokenizer"

say "3/8  Tokenize into shards of 128-token rows, with held-out documents set aside"
run python data_prep/tokenize_corpus.py --input "$DATA/docs.jsonl" --tokenizer "$DATA/tokenizer" \
    --sequence-length 128 --heldout-fraction 0.05 --tasks 2 --workers 2 --output "$DATA/shards"
run python data_prep/verify_shards.py "$DATA/shards"

train=(deepspeed --num_gpus 2 launch/pretrain.py --config configs/pretrain/demo.yaml "data.shards=$DATA/shards")

say "4/8  Pretrain a small gMLP on two processes with ZeRO, and stop halfway"
run "${train[@]}" train.stop_after_step=180

say "5/8  Resume: the same command, without the stop"
run "${train[@]}"

say "6/8  Evaluate on the held-out documents, beside the unigram perplexity of the same tokens"
run python launch/evaluate.py --run "$RUN" --shards "$DATA/shards"

say "7/8  Fill masked sentences"
run python launch/fill_mask.py --run "$RUN" \
    "Returns the <mask> of the array." \
    "If the file does not <mask>, an error is raised." \
    "The default value <mask> None."

say "8/8  Write a page with the run's curves, numbers and spatial filters"
run python launch/report.py "$RUN" --output "$RUN/report.html"
echo "Open $RUN/report.html in a browser. TensorBoard's files lie in $RUN/tensorboard; look at them with"
echo "\$ tensorboard --logdir outputs"
