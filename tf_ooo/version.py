"""Holds the version of this package, for whoever may not import it whole."""

__version__ = "0.1.0"
