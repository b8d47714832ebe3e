"""The errors of a configuration or of data that the user can correct."""

from collections.abc import Collection

USER_ERROR = 2
"""Exit code for errors that the user can correct: configuration and data."""


class ConfigError(ValueError):
    """Raised when the user's configuration cannot work; the message says why, and how to correct
    it.
    """

    exit_code = USER_ERROR


class DataError(ConfigError):
    """Raised for data that cannot be used; the message names the file and line."""


def refuse(problems: Collection[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"this configuration cannot run:{listed}")
