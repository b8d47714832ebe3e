"""The commands. Their imports take seconds, in which a launcher may die: who started this process is read before them."""

import os

STARTED_BY = os.getppid()
