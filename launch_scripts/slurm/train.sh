# Common part of the .slurm files, which source it in the job, on its first node. Needs $recipe; "$@" are overrides.
# Exits with the code of the ranks. With 85 (saved and stopped on request) the job is requeued first.

: "${SLURM_JOB_ID:?submit this with sbatch}"
# In a job array, %a in the recipe or an override is the task's number, as in the file names of sbatch.
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    recipe=${recipe//'%a'/$SLURM_ARRAY_TASK_ID}
    set -- "${@//'%a'/$SLURM_ARRAY_TASK_ID}"
fi
max_restarts=${MAX_RESTARTS:-100}
attempt=${SLURM_RESTART_COUNT:-0}
logs=runs/slurm/$SLURM_JOB_ID/attempt_$attempt
mkdir -p "$logs"
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export PATH="$repository/.venv/bin:$PATH"
# The working folder of a sweep may hold a queue.py; a checkout need not be installed.
export PYTHONSAFEPATH=1
if [[ -e $repository/vcore_ds/__main__.py ]]; then export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"; fi
# Lets a phase of a step reuse memory that another has freed, whatever the block sizes. The user's setting, under either
# name, takes precedence.
if [[ -z ${PYTORCH_CUDA_ALLOC_CONF+set} ]]; then export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF-expandable_segments:True}; fi

# SLURM also requeues a job that was preempted or lost a node, without a limit.
if ((attempt > max_restarts)); then
    echo "restart $attempt of job $SLURM_JOB_ID: expected at most $max_restarts (MAX_RESTARTS). Look at $(dirname "$logs")" >&2
    exit 1
fi

# The ranks meet at the first node, at the address by which SLURM itself reaches it: no node's own host name matters.
# A port per job, below those that Linux hands out by itself.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first_node" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR=${MASTER_ADDR:-$first_node} MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
# If SLURM does not know the GPUs of a node, set their number: RANKS_PER_NODE=8 sbatch ...
export RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}

# NCCL finds NVLink, InfiniBand, GPUDirect and SHARP without settings. These depend on the site (docs/slurm.md): remove the #
# where the preflight asks for it.
# export NCCL_SOCKET_IFNAME=ib0
# export GLOO_SOCKET_IFNAME=ib0
# export NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_2,mlx5_3

# Options for srun, such as a container's, from SRUN_OPTIONS or an array of this name in the .slurm file: docs/slurm.md.
srun_options+=(${SRUN_OPTIONS-})

# `on_every_node SECONDS COMMAND ARGUMENT...`: `vcore-ds COMMAND ARGUMENT...` once on each GPU of each node.
# "${srun_options[@]}" are added to srun's. SECONDS after the end of the first node SLURM kills the others.
# Single quotes: each node expands the variables itself. --node-rank: rank 0 is on the first node, whose log has the progress.
# exec: signals must reach torchrun and the ranks; a bash process above them would be killed by them.
# --export: some sites start steps with an empty environment. --cpu-bind: a step of one task may be bound to one core.
# --kill-on-bad-exit: ranks that exit with 85 do so within seconds of each other, not at once.
on_every_node() {
    local seconds=$1
    shift
    srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --export=ALL --cpu-bind=none --kill-on-bad-exit=0 --wait="$seconds" \
        "${srun_options[@]}" bash -c '
        # The node has the name that SLURM gives it: the %N of --output is that of the host.
        if [ -n "${LOGS-}" ]; then exec > "$LOGS/${SLURMD_NODENAME-}.log" 2>&1; fi
        exec python -m vcore_ds.distributed.torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$RANKS_PER_NODE" \
            ${NUMA_BINDING:+--numa-binding="$NUMA_BINDING"} \
            --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
            -m vcore_ds "$@"' bash "$@"
}

echo "job $SLURM_JOB_ID, attempt $attempt, on $SLURM_JOB_NODELIST with $RANKS_PER_NODE ranks a node; $(date)"
# A node that cannot start Python, say, never comes, and the others would wait for it.
on_every_node 60 preflight "$recipe" "$@"
code=$?
if ((code == 137)); then code=2; fi  # killed by SLURM, because another node has failed
if ((code == 0)); then
    echo "training: tail -f $logs/$first_node.log, and a log for each other node"
    export LOGS=$logs
    # One node may still write the last files of a run.
    on_every_node 1800 train "$recipe" "$@"
    code=$?
fi

# The last task of an array has the array's id, and requeueing that id restarts all tasks, ended ones included.
# SLURM_ARRAY_JOB_ID alone does not tell: a job submitted from within a task of an array inherits that array's.
job=$SLURM_JOB_ID
if [[ ${SLURM_ARRAY_JOB_ID:-} == "$job" ]]; then job+=_$SLURM_ARRAY_TASK_ID; fi
# Requeue=0 (--no-requeue or scontrol update): do not requeue the job, because another one may resume the run.
if ((code == 85)) && ((attempt < max_restarts)) && [[ $(scontrol show job "$job") == *Requeue=1* ]]; then
    echo "stopped and saved; back into the queue ($(date))"
    scontrol requeue "$job"
else
    echo "ended with exit code $code ($(date))"
fi
exit "$code"
