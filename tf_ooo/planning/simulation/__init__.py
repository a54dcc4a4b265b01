"""Finds when each task of a schedule runs, and whether it can: the simulator and the validator."""
