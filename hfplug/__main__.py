"""``python -m hfplug``: the same commands as the ``hfplug`` script, for ``accelerate launch -m hfplug`` and ``torchrun``."""

from hfplug.cli import main

if __name__ == "__main__":
    main()
