"""``tf-ooo bench data-parallel``: data parallel training against stock Horovod."""
