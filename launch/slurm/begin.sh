# The scripts of this folder begin with this one: it makes sure of all nodes, and sets MASTER_ADDR and MASTER_PORT.
set -euo pipefail
# `scancel --signal=USR1 --full` reaches this shell too, which must wait for its ranks. (With '' ranks ignore it too.)
trap : USR1
# Slurm 22.05 requeues a job that lost a node, but messages about the job's first life may come late, in its second life:
# the node's answer to the end of the first life may take the node away, and srun would wait for it without end; a signal
# to a step of the first life reaches the step of the same number. So each life first starts one more step than the life
# before, with all tasks.
for ((life = 0; life <= ${SLURM_RESTART_COUNT:-0}; life++)); do
    srun --immediate=60 true && continue
    echo "Slurm cannot start a task on each of the job's $SLURM_JOB_NUM_NODES nodes; it is asked to requeue the job" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit 1
done
# A port of the job's own: two jobs may share a node. (`| head -n 1` would end scontrol by SIGPIPE, and so the job.)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
