"""From a traced step to the graph that TensorFlow runs: plan, tasks, control edges, peaks."""
