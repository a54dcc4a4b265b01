"""``tf-ooo bench planner``: predictions beside published figures, optima and limits; nothing is trained."""
