"""Read command lines, files and values that may have names of other tools."""

from lightrft.config.command_line import Flags, group_flags
from lightrft.config.sections import Config, aliases, section_of_field
from lightrft.extras.compat import openrlhf
from lightrft.extras.compat.counterparts import SETTING_KEY, answer, names, verl_problems


def translate(tokens: list[str], config: Config) -> tuple[Flags, list[str]]:
    """Return the flags of this program with the meaning of a command line, and a sentence for each
    flag that has no counterpart. Notices go to `config`.
    """
    settings = [token for token in tokens if SETTING_KEY.fullmatch(token)]
    problems = verl_problems(settings)
    written = group_flags([token for token in tokens if token not in settings])

    if openrlhf.has_tracker_switch(written):
        written.setdefault("report_to", [config.observe.report_to])
    translation = openrlhf.translate(written)
    config.notices += translation.notices
    problems += translation.refused

    of_trl = names("trl").keys() - section_of_field().keys() - aliases().keys()
    for name in [name for name in translation.flags if name in of_trl]:
        words = translation.flags.pop(name)
        value = words[0] if len(words) == 1 else None
        problems.append(f"unknown flag --{name}; {answer(names('trl')[name], value)}")

    return translation.flags, problems
