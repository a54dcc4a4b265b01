"""Kernels that compute dO and dW together and cannot be taken apart, each with the reason."""

from __future__ import annotations

_NORM = "one kernel computes both: dO needs the reductions that are the scale and offset gradients"
_RNN = "one kernel runs all time steps backward and sums the weight gradient inside"
_NORM_OPS = (
    "FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", "_FusedBatchNormGradEx",
    "BatchNormWithGlobalNormalizationGrad", "LayerNormGrad", "_MklFusedBatchNormGrad",
    "_MklFusedBatchNormGradV2", "_MklFusedBatchNormGradV3",
)  # fmt: skip
_RNN_OPS = (
    "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "BlockLSTMGrad", "BlockLSTMGradV2",
    "LSTMBlockCellGrad", "GRUBlockCellGrad",
)  # fmt: skip
FUSED_REASONS = {**dict.fromkeys(_NORM_OPS, _NORM), **dict.fromkeys(_RNN_OPS, _RNN)}
