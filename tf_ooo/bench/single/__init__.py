"""``tf-ooo bench single``: one GPU, dW on side streams against what else trains the model."""
