"""Makes of a traced step the graph that TensorFlow runs: plan, tasks, control edges, peaks."""
