"""GraphDef in, GraphDef out: analysis and rewriting of training graphs; knows no schedules, costs or Keras."""
