"""`python -m indictune`, which launchers can start too."""

import sys

from indictune.cli import main

sys.exit(main())
