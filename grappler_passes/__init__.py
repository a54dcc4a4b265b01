"""GraphDef in, GraphDef out: training graphs analysed and rewritten; knows no schedules, costs or Keras."""
