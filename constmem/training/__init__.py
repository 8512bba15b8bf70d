"""Training: the loop, recipes, sources of tasks, run folders."""
