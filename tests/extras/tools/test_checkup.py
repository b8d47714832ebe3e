"""What the doctor says about a machine."""

import socket
from pathlib import Path

import pytest

from lightrft.extras.tools import checkup as module
from lightrft.extras.tools.checkup import Check, checkup


def named(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_this_machine_can_run(tmp_path: Path) -> None:
    checks = named(checkup(tmp_path / "not" / "there" / "yet"))
    assert {
        "packages",
        "device",
        "host memory",
        "disk",
        "shared memory",
        "host name",
        "port",
    } <= set(checks)
    assert not any(check.fatal for check in checks.values())
    assert "torch" in checks["packages"].finding and str(tmp_path.anchor) in checks["disk"].finding


@pytest.mark.parametrize(
    ("address", "interface", "flagged"),
    [("127.0.1.1", None, True), ("10.1.2.3", None, False), ("127.0.1.1", "eth0", False)],
)
def test_a_host_name_of_this_machine_alone_is_flagged(
    address, interface, flagged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: address)
    check = module._name()
    assert (
        ("GLOO_SOCKET_IFNAME" in check.problem) == flagged
        and address in check.finding
        and not check.fatal
    )


def test_what_is_wrong_is_said_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        monkeypatch.setattr(module, "RENDEZVOUS_PORT", taken.getsockname()[1])
        monkeypatch.setattr(module, "CORE", {"torch": ">=99"})
        monkeypatch.setattr(module, "ENGINE_VERSIONS", {"vllm": ">=99"})
        monkeypatch.setattr(module, "installed_version", lambda name: "0.32.0")
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "none")
        monkeypatch.setattr(
            module.shutil, "disk_usage", lambda path: type("usage", (), {"free": 10**9})
        )
        checks = named(checkup(tmp_path))

    assert checks["packages"].fatal and "lightrft works with >=99" in checks["packages"].problem
    assert (
        "--master-port" in checks["port"].problem
        and "tested: >=99" in checks["engine vllm"].problem
    )
    assert (
        "--max_ckpt_num" in checks["disk"].problem
        and "exchange tensors" in checks["shared memory"].problem
    )
