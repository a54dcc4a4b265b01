"""``python -m tf_ooo.bench.gpu_day`` is ``tf-ooo bench gpu-day``."""

from tf_ooo.bench.single.gpu_day import gpu_day

if __name__ == "__main__":
    gpu_day()
