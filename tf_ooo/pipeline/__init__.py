"""Pipeline parallel: a model cut into stages on several devices, of one process or of several hosts."""
