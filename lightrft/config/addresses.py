"""Check addresses of servers and their keys, before they fail or are written where others can read them."""

import os
from urllib.parse import urlsplit


def address_problem(flag: str, url: str, key: str) -> str:
    """Return the reason why `url`, with the key in the environment variable `key`, cannot be used; empty if it can.

    The reason contains no secret.
    """
    try:
        parts = urlsplit(url)
        host, secret = parts.hostname, parts.username or parts.password
        parts.port  # noqa: B018  (ValueError for no number)
    except ValueError as error:
        return f"{flag}: the address cannot be read: {error}"
    if secret:
        return (
            f"{flag} {parts.scheme}://...@{host}: a user or password in an address would be written to config.yaml, checkpoints "
            f"and logs. Leave it out, and set {key}=user:password in the environment"
        )
    if parts.scheme not in ("http", "https") or not host or any(character.isspace() for character in url):
        return f"{flag} {url!r} is not an address such as http://host:8000/path"
    value = os.environ.get(key, "")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        return f"the environment variable {key} must not contain line ends, surrounding spaces or non-ASCII characters"
    return ""
