"""The error of a configuration or of data that the user can correct."""


class ConfigError(ValueError):
    """Raised when the user's configuration cannot work; the message says why, and how to correct
    it.
    """


class DataError(ConfigError):
    """Error for data that cannot be used; the message names the file and line."""
