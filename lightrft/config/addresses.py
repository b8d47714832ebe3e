"""Addresses of servers, and keys for them, that cannot work or would be written down where others read them."""

import os
from urllib.parse import urlsplit


def address_problem(flag: str, url: str, key: str) -> str:
    """The reason why `url`, with the environment variable `key`, cannot be asked; empty where it can. It shows no secret."""
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
        return f"{flag} {url!r} is no address like http://host:8000/path"
    value = os.environ.get(key, "")
    if not (value.isascii() and value.isprintable()) or value != value.strip():
        return f"the environment variable {key} has characters that no key has: a line end, blanks around it, or beyond ASCII"
    return ""
