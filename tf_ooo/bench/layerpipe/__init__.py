"""``tf-ooo bench layerpipe``: LayerPipe against PipeDream on worker processes."""
