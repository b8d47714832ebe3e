"""Flags of the launch scripts of other tools, as the flags that say the same here."""

from lightrft.config.errors import ConfigError

RENAMED = {"--remote_rm_url": "--reward"}
SWITCHES: dict[str, list[str]] = {
    "--disable_engine_sleep": ["--no_enable_engine_sleep"],
    "--packing_samples": ["--batching=packed"],
    "--use_fire": ["--first_token_temperature=10"],
    "--flash_attn": [],  # always, where the device has it
    "--save_trajectories": [],  # always; --num_trajectories_to_save says how many
}
"""Switches of other tools, and what they are here."""


def translated(flags: list[str]) -> list[str]:
    """Return the flags in this program's words. Switches come first, so that a flag of this program beside them wins."""
    switches: list[str] = []
    rest: list[str] = []
    tokens = list(flags)
    while tokens:
        name, equals, value = tokens.pop(0).partition("=")
        if name in SWITCHES:
            if not equals and tokens and tokens[0].lower() in ("true", "false"):
                value = tokens.pop(0)
            if value.lower() not in ("", "true"):
                raise ConfigError(f"{name} {value}: it stands alone, or with true; leave it out")
            switches += SWITCHES[name]
        else:
            rest.append(RENAMED.get(name, name) + equals + value)
    return switches + rest
