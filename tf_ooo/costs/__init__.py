"""What tasks cost: seconds and bytes, measured or from formulas, as plain data."""

from tf_ooo.costs.layer_costs import LayerCosts, Link

__all__ = ["LayerCosts", "Link"]
