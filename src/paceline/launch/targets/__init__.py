"""Launchers: torchrun, Slurm, Ray, mpiexec, Kubernetes."""
