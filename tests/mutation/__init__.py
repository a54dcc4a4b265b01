"""Changes one place of a module at a time; its quick tests have to notice."""
