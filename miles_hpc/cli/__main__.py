"""`python -m miles_hpc.cli` is `miles-hpc`."""

import sys

from miles_hpc.cli.main import main

sys.exit(main())
