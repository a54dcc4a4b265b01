"""Names what vulture takes for dead and is not, with the reason; `make lint` reads it, nothing imports it."""

# Keras calls a callback's methods and asks which of them do something.
on_train_begin
on_train_end
on_epoch_begin
on_epoch_end
on_test_begin
on_train_batch_begin
on_train_batch_end
_implements_train_batch_hooks
_implements_test_batch_hooks
_implements_predict_batch_hooks

# Python calls them: attributes of a module that load on first use; an error's cause.
__getattr__
__dir__
__cause__

# Notebooks call it.
_repr_html_

# Settings of other libraries: TensorFlow's protobufs and functions, OR-Tools, PyTorch, click.
min_graph_nodes
function_optimization
use_plugin_optimizers
learning_rate
disable_meta_optimizer
_omit_frequent_tracing_warning
_closed
_strategy
max_time_in_seconds
num_workers
allow_tf32
exit_code
ag_pass_through

# Our own marks on functions of TensorFlow's, looked for by name.
_ooo_inner
decorated

# Public: by name in the table of tf_ooo/__init__.py, or fields of the public report.
classify
from_arguments
resolved_mode
profiling_overhead_s
dW
U
comm
own_dO
sends
predicted_bubble_fraction
serial_step_s

# For tests: how often Python was called, whether an optimum is proved, and all that may be wrong with a
# schedule (the simulator itself asks only for deadlocks and missing tasks).
python_calls
proved
validate

# Told to the other ranks by name, with all fields of a message.
class_weight

# Read by a template.
mood

# Summed over a stage's layers by its name.
stored_bytes

# The page's template reads them.
bars_title
percent
sections

# Commands that click calls by their names on the command line.
list_
all_
why_
run_

# The suites of the benchmarks use it.
same_bits_as
serve_worker  # a process is started with it

# Options that XLA inside JAX is given.
num_partitions
num_replicas
env_option_overrides

# Users and examples call them.
free_port
high_priority_main_stream
