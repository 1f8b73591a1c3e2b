"""Starts a script in several processes of this machine that form one `jax.distributed` group, for trying and testing.

    python -m partjit.launch -n 4 --devices-per-process 2 script.py

is the command `partjit launch`. The script calls `jax.distributed.initialize()` and nothing else, so that it runs
unchanged under Slurm, Kubernetes and MPI.
"""
