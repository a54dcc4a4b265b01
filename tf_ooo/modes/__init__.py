"""Has one folder for each mode; none imports another."""
