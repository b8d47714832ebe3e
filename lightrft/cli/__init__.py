"""Commands of the program. The process id of the launcher is read before their imports, during which it may die."""

import os

STARTED_BY = os.getppid()
