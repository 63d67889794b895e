# The scripts of this folder begin with this one: it makes sure of all nodes, and sets what all tasks need.
set -euo pipefail
: "${SLURM_JOB_ID:?there is no Slurm job here: submit this script with sbatch}"
: "${SLURM_CPUS_PER_TASK:?give sbatch --cpus-per-task}"
# `scancel --signal=USR1 --full` reaches this shell too, which must wait for its ranks. (With '' ranks ignore it too.)
trap : USR1

# Has Slurm start the job again, unless each of its last 5 lives too ended so within half an hour: then it would go on
# without end. A file in the folder of the sbatch command has the numbers of such lives; a job that ends well removes it.
requeue() {
    local life=${SLURM_RESTART_COUNT:-0} lives=slurm-$SLURM_JOB_ID.short-lives in_a_row=0
    ((SECONDS > 1800)) || echo "$life" >>"$lives" || return
    while grep -qsxe "$((life - in_a_row))" "$lives"; do ((++in_a_row)); done
    if ((in_a_row > 5)); then
        echo "the job began $in_a_row times in a row in vain and is not requeued again; the lines above say why. Mend" \
            "that, or leave a node out with --exclude, and submit the same command: it resumes" >&2
    else
        scontrol requeue "$SLURM_JOB_ID"
    fi
}
export -f requeue

# Slurm 22.05 requeues a job that lost a node, but messages about the job's first life may come late, in its second life:
# the node's answer to the end of the first life may take the node away, and srun would wait for it without end; a signal
# to a step of the first life reaches the step of the same number. So each life first starts one more step than the life
# before, with all tasks.
for ((life = 0; life <= ${SLURM_RESTART_COUNT:-0}; life++)); do
    srun --immediate=60 true && continue
    echo "Slurm cannot start a task on each of the job's $SLURM_JOB_NUM_NODES nodes: $SLURM_JOB_NODELIST" >&2
    requeue
    exit 1
done
# A port of the job's own: two jobs may share a node. (`| head -n 1` would end scontrol by SIGPIPE, and so the job.)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# On a disk of the node: the usual place, in the home folder, is often on a network filesystem.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton-$(id -u)}
