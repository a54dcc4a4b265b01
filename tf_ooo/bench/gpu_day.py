"""``python -m tf_ooo.bench.gpu_day`` is ``tf_ooo.bench.single.gpu_day``."""

from tf_ooo.bench.single.gpu_day import main

if __name__ == "__main__":
    main()
