"""Devices and addresses, joining workers, watching them, links between them."""
