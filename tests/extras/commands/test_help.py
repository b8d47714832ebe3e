"""Commands that take the flags of another one explain them too."""

import pytest

from lightrft.__main__ import main


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("plan --help lora", "--lora_rank int"),
        ("plan --command train_dpo --help dpo_loss", "--dpo_loss {"),
        ("check train_kto --help desirable", "--desirable_weight float"),
        ("chat --help port", "--port int"),
        ("tune train_dpo --help dpo_loss", "--dpo_loss {"),
    ],
)
def test_commands_that_take_flags_of_another_explain_them(capsys, words, flag):
    with pytest.raises(SystemExit):
        main(words.split())
    assert flag in capsys.readouterr().out
