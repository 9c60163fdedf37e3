#!/bin/bash
# cluster.generators
#SBATCH --job-name=r
#SBATCH --comment='slurm_grpo /shared/runs/r'
#SBATCH --output=/shared/runs/r/jobs/0/slurm.out
#SBATCH --chdir=/shared/runs/r/jobs/0
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue
#SBATCH hetjob
# cluster.trainers
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --requeue

export PYTHONPATH=/shared/runs/r/jobs/0/code${PYTHONPATH:+:$PYTHONPATH}
export SUBMITIT_EXECUTOR=slurm
rm -f /shared/runs/r/jobs/0/*_result.pkl
trap '' USR1 TERM
exec /envs/base/bin/python -u -m submitit.core._submit /shared/runs/r/jobs/0

# Then, by the supervisor:
srun --job-name=engine-0 --nodes=1 --ntasks=1 --nodelist=x0 --cpus-per-task=8 --overlap --mem=0 --mpi=none --export=ALL --kill-on-bad-exit=0 --wait=0 --het-group=0 /envs/base/bin/python -m slurm_grpo.jobs.task_entry /shared/runs/r/attempts/0/engine-0.tasks.json
srun --job-name=trainers --nodes=1 --ntasks=2 --nodelist=x0,x0 --cpus-per-task=4 --overlap --mem=0 --mpi=none --export=ALL --kill-on-bad-exit=0 --wait=0 --het-group=1 --distribution=arbitrary /envs/base/bin/python -m slurm_grpo.jobs.task_entry /shared/runs/r/attempts/0/trainers.tasks.json
