#!/bin/bash
# cluster.generators
#SBATCH --job-name=r
#SBATCH --comment='slurm_grpo /shared/runs/r'
#SBATCH --output=/shared/runs/r/jobs/0/slurm.out
#SBATCH --chdir=/shared/runs/r/jobs/0
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --partition=gen
#SBATCH --account=grpo
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem-per-cpu=8192M
#SBATCH --gpus-per-node=a100:4
#SBATCH --requeue
#SBATCH hetjob
# cluster.trainers
#SBATCH --partition=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --constraint=nvlink
#SBATCH --mem-per-cpu=8192M
#SBATCH --gpus-per-node=a100:2
#SBATCH --requeue

module purge
module load apptainer
export PYTHONPATH=/shared/runs/r/jobs/0/code${PYTHONPATH:+:$PYTHONPATH}
export SUBMITIT_EXECUTOR=slurm
rm -f /shared/runs/r/jobs/0/*_result.pkl
trap '' USR1 TERM
exec /envs/base/bin/python -u -m submitit.core._submit /shared/runs/r/jobs/0

# Then, by the supervisor:
srun --job-name=engine-0 --nodes=1 --ntasks=1 --nodelist=x0 --cpus-per-task=16 --overlap --mem=0 --mpi=none --export=ALL --kill-on-bad-exit=0 --wait=0 --het-group=0 --gpus-per-node=a100:4 apptainer exec --nv --bind /scratch,/models /images/slurm-grpo.sif env PYTHONPATH=/shared/runs/r/jobs/0/code python3 -m slurm_grpo.jobs.task_entry /shared/runs/r/attempts/0/engine-0.tasks.json
srun --job-name=trainers --nodes=1 --ntasks=2 --nodelist=x0,x0 --cpus-per-task=4 --overlap --mem=0 --mpi=none --export=ALL --kill-on-bad-exit=0 --wait=0 --het-group=1 --distribution=arbitrary --gpus-per-node=a100:2 apptainer exec --nv --bind /scratch,/models /images/slurm-grpo.sif env PYTHONPATH=/shared/runs/r/jobs/0/code python3 -m slurm_grpo.jobs.task_entry /shared/runs/r/attempts/0/trainers.tasks.json
