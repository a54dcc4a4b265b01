"""One folder for each mode; none imports another."""
