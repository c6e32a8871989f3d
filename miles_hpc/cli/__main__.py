"""`python -m miles_hpc.cli` is `miles-hpc`."""

import sys

from miles_hpc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
