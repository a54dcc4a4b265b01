"""What several policies are built from."""
