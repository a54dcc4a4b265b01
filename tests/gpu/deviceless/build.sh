#!/bin/bash
# build.sh WORK: fetches the GPU build of TensorFlow and two CUDA packages into WORK (1.6 GB unpacked) and builds
# WORK/gpuhlo, which compiles HLO for an H100 on a machine without a GPU.  About 3 minutes on two cores.
# Then: TF_OOO_GPUHLO=WORK python -m pytest tests/gpu/test_deviceless.py
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd); W=$(mkdir -p "$1" && cd "$1" && pwd)
mkdir -p "$W"/{whl,nv,full}
python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform any -d "$W/whl" \
  tensorflow==2.21.0 nvidia-cuda-nvcc-cu12==12.5.82 nvidia-cuda-runtime-cu12==12.5.82
for f in "$W"/whl/nvidia_*.whl; do unzip -q -o "$f" -d "$W/nv"; done
[ -d "$W/full/tensorflow" ] || unzip -q "$W"/whl/tensorflow-2.21.0-*.whl -d "$W/full"
chmod +x "$W/nv/nvidia/cuda_nvcc/bin/ptxas"
T=$W/full/tensorflow; I=$T/include; E=$I/external
g++ -std=c++17 -O0 -fno-access-control -DWITH_BACKEND -D_GLIBCXX_USE_CXX11_ABI=1 -DEIGEN_MAX_ALIGN_BYTES=64 -w \
  -I"$I" -I"$E/llvm-project/mlir/include" -I"$E/llvm-project/llvm/include" -I"$E/highwayhash" \
  -I"$E/farmhash_archive/src" -I"$E/com_googlesource_code_re2" -I"$E/ml_dtypes_py" -I"$E/stablehlo" \
  -I"$E/shardy" -I"$I/xla/mlir_hlo" -I"$E/cudnn_frontend_archive/include" \
  -I"$E/local_config_cuda/cuda" -I"$E/cuda_cudart/include" -I"$E/dlpack/include" \
  "$HERE/gpuhlo.cc" -o "$W/gpuhlo" -Wl,--allow-shlib-undefined -Wl,--no-as-needed \
  -L"$T" -l:libtensorflow_cc.so.2 -l:libtensorflow_framework.so.2 -Wl,-rpath,"$T"
echo "$W/gpuhlo"
