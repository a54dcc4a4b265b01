"""Analyses and rewrites training graphs, GraphDef in, GraphDef out; knows no schedules, costs or Keras."""
