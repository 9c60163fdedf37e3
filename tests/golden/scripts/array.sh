#!/bin/bash
# cluster.shared
#SBATCH --job-name=lr
#SBATCH --comment='slurm_grpo /shared/sweeps/lr'
#SBATCH --output=/shared/sweeps/lr/logs/%A_%a.out
#SBATCH --chdir=/shared/sweeps/lr
#SBATCH --array=0-7%4
#SBATCH --time=4:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue

export PYTHONPATH=/shared/sweeps/lr/code${PYTHONPATH:+:$PYTHONPATH}
trap '' USR1 TERM
exec /envs/base/bin/python -u -m slurm_grpo.jobs.batch --sweep /shared/sweeps/lr
