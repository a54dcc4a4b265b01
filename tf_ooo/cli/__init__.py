"""The command line ``tf-ooo``: ``info``, ``doctor``, ``demo``, ``plan``, ``simulate``, ``run``, ``worker``.

Modules here import neither TensorFlow nor Keras before a command needs them.
"""

from tf_ooo.cli.about import demo, info
from tf_ooo.cli.checks import doctor
from tf_ooo.cli.group import main
from tf_ooo.cli.plan import plan
from tf_ooo.cli.simulate import simulate
from tf_ooo.cli.worker import run, worker

__all__ = ["main"]

for _command in (info, doctor, demo, plan, simulate, run, worker):
    main.add_command(_command)
