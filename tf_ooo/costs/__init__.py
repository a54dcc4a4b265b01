"""Gives the costs of tasks as plain data: seconds and bytes, measured or calculated."""

from tf_ooo.costs.devices import DEVICES, DeviceModel, device
from tf_ooo.costs.layer_costs import LayerCosts, Link
from tf_ooo.costs.models import model_costs
from tf_ooo.costs.table import CostTable

__all__ = ["DEVICES", "CostTable", "DeviceModel", "LayerCosts", "Link", "device", "model_costs"]
