"""``tf-ooo bench unequal``: workers of which one is slow, with stages for that and as if all were alike."""
