"""miles_hpc: LLM reinforcement-learning rollouts and training inside a Slurm allocation, with no Ray."""

__version__ = "0.1.0"
