"""Python runs this as it starts, where this folder is on its path: Keras does without what it need not have.

Matplotlib, scikit-learn and pandas take 3 of the 8 seconds of a core in which a script imports Keras.
"""

import sys

sys.modules.update(dict.fromkeys(("matplotlib", "pandas", "sklearn")))
