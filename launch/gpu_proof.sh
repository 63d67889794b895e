#!/usr/bin/env bash
# Shows on one GPU what could not be shown without: launch/gpu_proof.sh OUT, within 8 minutes and without a network.
#
#   launch/gpu_proof.sh OUT                    every part below, in this order
#   launch/gpu_proof.sh OUT PART ...           only environment and these; OUT keeps the results of earlier parts
#   launch/gpu_proof.sh --tiny OUT [PART ...]  a trial on a CPU, at tiny shapes: it shows that the parts run
#
# Leaves OUT/report.md (the parts, the figures, and last the goals), OUT/results.jsonl (a line for each part, written as
# the part ends), OUT/log.txt (what the parts said) and, while a check runs, OUT/running.jsonl (what it found so far).
# A part that fails or is cut by its limit does not stop the others; the script then leaves with 1.
#
# The number of a part is the seconds that it is sure to have. Seconds that earlier parts did not need go to the next: a
# part is cut only when these are used up too. Parts beyond the TOTAL run if the earlier ones leave them their seconds.
# Python is PYTHON (default: python3). Checkpoints of up to 23 GB pass through TMPDIR, and its disk is the one timed.
set -uo pipefail
TOTAL=${GPU_PROOF_SECONDS:-480}

tiny=false
if [[ ${1:-} == --tiny ]]; then tiny=true && shift; fi
if [[ -z ${1:-} ]]; then sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2; fi
mkdir -p "$1" && out=$(cd "$1" && pwd) && shift && chosen=("$@") || exit 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"  # without a network the host's name may have no address
scratch=$(mktemp -d)
measured=$scratch/measured.json # a benchmark writes it anew with each figure, so that one that is cut leaves what it has
deadline=0 failed=0 running= known=
trap 'rm -rf "$scratch"' EXIT
trap '[[ $running ]] && kill "$running"; exit 130' INT TERM

# part NAME SECONDS COMMAND...
part() {
    local name=$1 seconds=$2 began=$SECONDS left=$((TOTAL - SECONDS)) limit code
    shift 2
    if $tiny; then ((seconds *= 10)); fi # it says nothing of time, and a busy CPU may need it
    ((deadline += seconds))
    known+=" $name "
    if ((${#chosen[@]})) && [[ " environment ${chosen[*]} " != *" $name "* ]]; then return; fi
    if ((left < seconds)); then
        printf '{"check": "time", "status": "not run", "reason": "needs %s s, and %s s were left"}\n' "$seconds" "$left" |
            "$python" benchmarks/gpu_proof.py record "$out" "$name" --printed /dev/stdin
        return
    fi
    limit=$((deadline - began > seconds ? deadline - began : seconds))
    if ((limit > left)); then limit=$left; fi
    printf '\n== %s: %s\n' "$name" "$*" >>"$out/log.txt"
    timeout --kill-after=3 "$limit" "$@" >"$out/running.jsonl" 2>>"$out/log.txt" &
    running=$!
    wait "$running"
    code=$?
    running=
    if [[ -e $measured ]]; then mv "$measured" "$out/running.jsonl"; fi
    "$python" benchmarks/gpu_proof.py record "$out" "$name" --code "$code" --seconds $((SECONDS - began)) --limit "$limit" \
        --command "$*" --printed "$out/running.jsonl" || failed=1
    rm "$out/running.jsonl"
}

check() { # NAME SECONDS RECIPE OVERRIDES...
    part "$1" "$2" "$python" benchmarks/gpu_proof.py "$1" --config "configs/pretrain/$3.yaml" engine.kind=single "${@:4}" "${shape[@]}"
}
benchmark() { # NAME SECONDS PART RECIPE OPTIONS...
    part "$1" "$2" "$python" benchmarks/run.py --parts "$3" --config "configs/pretrain/$4.yaml" --rounds 3 \
        --output "$measured" "output_dir=$scratch" "${@:5}" "${shape[@]}"
}
kernels() { # RECIPE
    part "kernels_$1" 50 "${interpreter[@]}" "$python" benchmarks/kernels.py --config "configs/pretrain/$1.yaml" \
        --rounds 3 --output "$measured" "${shape[@]}" "${on_cpu[@]}"
}

shape=() interpreter=() on_cpu=() without_gpu=()
few_blocks=(model.num_blocks=4 model.vocab_size=8000 train.global_batch_size=8 train.micro_batch_size=4)
if $tiny; then
    shape=(model.num_blocks=2 model.d_model=16 model.d_ffn=32 model.sequence_length=32 model.vocab_size=1000
        train.global_batch_size=4 train.micro_batch_size=2 train.device=cpu train.precision=float32 train.compile=false)
    interpreter=(env TRITON_INTERPRET=1)
    on_cpu=(--device cpu) without_gpu=(--tiny)
fi

# Every part has a process of its own; importing torch and starting CUDA take 5 to 10 s of its time. The first part that
# trains a shape also compiles it, which takes 5 to 15 s for a group of blocks on an idle host.
part environment 20 "$python" benchmarks/gpu_proof.py environment "${without_gpu[@]}"
((failed)) && cat "$out/report.md" && exit 1
part gpu_tests 40 "$python" benchmarks/gpu_proof.py gpu_tests
benchmark step_gmlp_base 85 step gmlp_base --no-peers
check engines 60 gmlp_base "${few_blocks[@]}" train.compile=false
check recipe 65 gmlp_base
benchmark step_gmlp_xlarge 90 step gmlp_xlarge --no-peers
benchmark checkpoint_gmlp_base 20 checkpoint gmlp_base
check stop 20 gmlp_base "${few_blocks[@]}" train.compile=false
check compile 75 gmlp_base "${few_blocks[@]}"
check auto 20 gmlp_base train.compile=false
# 495 s so far; the ones below as the time allows.
benchmark step_gmlp_large 85 step gmlp_large --no-peers
kernels gmlp_base
benchmark step_amlp_large 60 step amlp_large --no-peers
benchmark peers_gmlp_base 75 step gmlp_base
kernels amlp_large
kernels gmlp_xlarge
kernels gmlp_large
benchmark checkpoint_gmlp_large 30 checkpoint gmlp_large
benchmark peers_amlp_large 85 step amlp_large
benchmark peers_gmlp_large 85 step gmlp_large
benchmark peers_gmlp_xlarge 100 step gmlp_xlarge
benchmark checkpoint_amlp_large 30 checkpoint amlp_large
benchmark checkpoint_gmlp_xlarge 60 checkpoint gmlp_xlarge

for name in "${chosen[@]}"; do
    if [[ $known != *" $name "* ]]; then echo "no part is called $name; there are $known" >&2 && failed=1; fi
done
printf '\n' && cat "$out/report.md"
exit $failed
