"""Devices that are emulated: TensorFlow's own graphs, placement and messages, and tasks that wait."""
