"""``tf-ooo bench mesh``: replicas, pipelines and both, and which of them is chosen."""
