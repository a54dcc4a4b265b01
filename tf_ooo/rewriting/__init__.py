"""Turns a traced step into the graph that TensorFlow runs: plan, tasks, control edges, memory peaks."""
