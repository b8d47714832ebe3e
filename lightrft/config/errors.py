"""The error of a configuration or of data that the user can mend."""


class ConfigError(ValueError):
    """The user's configuration cannot work; the message says why and the way out."""
