"""``python -m tf_ooo`` is ``tf-ooo``."""

from tf_ooo.cli import main

if __name__ == "__main__":
    main()
