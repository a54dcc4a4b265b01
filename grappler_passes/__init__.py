"""Analyses and rewrites training graphs: GraphDef in, GraphDef out. It knows no schedules, costs or Keras."""
