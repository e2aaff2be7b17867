"""``python -m vslam_features`` is the ``vslam-features`` command."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
