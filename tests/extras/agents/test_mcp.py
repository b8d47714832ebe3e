"""Tools of real MCP servers, which are written with the package's own class.

tests/test_extras.py runs this file in the environment that has the package.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

import pytest

from lightrft.extras.agents.programs import ProgramSetup
from lightrft.extras.agents.tools import MAX_RESULT_CHARACTERS, schemas
from player import Player

pytest.importorskip("mcp.server.mcpserver", reason="test_extras.py runs it where mcp is")
pytestmark = pytest.mark.slow

SERVER = '''
import os
import signal
import sys
import threading
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
sold = []


@server.tool()
def buy(fruit: str, count: int = 1) -> str:
    """Buy fruit."""
    if fruit == "stone":
        raise ToolError("no such fruit")
    sold.extend([fruit] * count)
    return ", ".join(sold)


@server.tool()
def sizes(name: str) -> list[dict[str, int]]:
    """Return the sizes of a fruit."""
    return [{"small": 1, "large": 2}]


@server.tool()
def picture() -> list:
    """Show a picture and a caption."""
    return [Image(data=b"no pixels", format="png"), "a pear"]


@server.tool()
def story(letters: int) -> str:
    """Tell a story."""
    return "x" * letters


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def process(stays: bool = False) -> int:
    """Return the number of the process, which perhaps does not end with its input."""
    if stays:
        threading.Thread(target=time.sleep, args=(600,)).start()
    return os.getpid()


@server.tool()
def die() -> None:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
'''
ODD = """
import json
import sys

LISTED, = sys.argv[1:]
REFUSED = {"code": -32600, "message": "not today"}  # the code that also ends a session by HTTP
LOST = {"code": -32000, "message": "no table"}  # the code of a closed connection
RESULTS = {
    "speak": {"content": [], "isError": True},
    "plot": {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}], "structuredContent": {"a": "ä"}},
    "link": {"content": [{"type": "resource_link", "uri": "file:///table", "name": "prices"}]},
}
calls = 0


def write(line):
    sys.stdout.buffer.write(line + b"\\n")
    sys.stdout.buffer.flush()


def answer(method, parameters):
    global calls
    if method == "initialize":
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "o", "version": "1"}}}
    if method == "tools/list":
        names = LISTED.split("+") if LISTED != "-" else []
        return {"result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]}}
    if method != "tools/call":
        return {"error": {"code": -32601, "message": "no such method"}}

    calls += 1
    name = parameters["name"]
    if name in ("refuse", "lose"):
        return {"error": REFUSED if name == "refuse" else LOST}
    if name == "fall":
        sys.exit("the roof is gone")
    said = {"content": [{"type": "text", "text": f"{calls} {json.dumps(parameters.get('arguments'))}"}]}
    return {"result": RESULTS.get(name, said)}


sys.stderr.buffer.write(b"\\xff starting\\n")
if LISTED == "nothing":
    sys.stderr.buffer.write(b"no key \\xff\\n")
    sys.exit(1)
write(b"\\xff\\xfe a banner")
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        reply = answer(message["method"], message.get("params"))
        write(json.dumps({"jsonrpc": "2.0", "id": message["id"], **reply}).encode())
"""
"""Server without the package: it writes a banner that is no text, and errors with any code."""
ENVIRONMENT = '''
import os


class Shop:
    """Ends its process in a tool of its own."""

    def break_down(self) -> None:
        """Break down."""
        os._exit(3)
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    file = tmp_path_factory.mktemp("mcp") / "shop.py"
    file.write_text(SERVER)
    return f"{shlex.quote(sys.executable)} {file}"


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    file = tmp_path_factory.mktemp("odd") / "odd.py"
    file.write_text(ODD)
    return f"{shlex.quote(sys.executable)} {file}"


def player(server, name=""):
    limits = {"longest": 100_000, "environment_workers": 2, "tool_seconds": 20.0}
    return Player(name, tools=[f"mcp:{server}"], chat=True, **limits)


@pytest.fixture(scope="module")
def local(server, tmp_path_factory):
    """Return a player of an environment with a tool of its own beside the server's."""
    file = tmp_path_factory.mktemp("environment") / "mine.py"
    file.write_text(ENVIRONMENT)
    made = player(server, f"{file}:Shop")
    yield made
    made.episodes.close()


def call(name, /, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def replies(sample):
    assert sample.episode.problem == ""
    return [message["content"] for message in sample.episode.messages if message["role"] == "tool"]


def has_ended(process):
    """Wait a moment for the end of a process."""
    until = time.monotonic() + 10
    while os.path.exists(f"/proc/{process}") and time.monotonic() < until:
        time.sleep(0.05)
    return not os.path.exists(f"/proc/{process}")


def listening(server, port):
    """Start a server that answers over HTTP."""
    started = subprocess.Popen([*shlex.split(server), str(port)])
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return started
        time.sleep(0.05)
    raise TimeoutError("the server does not listen")


def test_tools_are_described_by_the_schemas_of_the_server(server):
    tools = ProgramSetup("", (f"mcp:{server}", "calculator")).program().all_tools
    described = {each["function"]["name"]: each["function"] for each in schemas(tools)}
    assert [*described] == [
        *("buy", "sizes", "picture", "story", "wait", "process", "die"),
        "calculator",
    ]
    buy = described["buy"]
    assert buy["description"] == "Buy fruit." and buy["parameters"]["required"] == ["fruit"]
    assert buy["parameters"]["properties"]["count"]["type"] == "integer"


def test_results_and_errors_are_read_and_each_episode_has_a_server(local):
    turns = [
        call("buy", fruit="pear", count=2) + call("sizes", name="pear") + call("picture"),
        call("buy", fruit="stone") + call("buy", color="red") + call("wait", seconds=60),
        call("story", letters=3 * MAX_RESULT_CHARACTERS) + call("process"),
        "done$",
    ]
    samples = local.play([turns, turns])
    numbers = set()
    for sample in samples:
        bought, sizes, picture, stone, color, late, story, process = replies(sample)
        assert bought == "pear, pear" and json.loads(sizes) == {"small": 1, "large": 2}
        assert picture == "(image: the model reads only text)\na pear"
        assert stone.startswith("Error: ") and "no such fruit" in stone
        assert color.startswith("Error: ") and "fruit" in color and "Field required" in color
        assert late == "Error: wait took more than 20 s"
        assert f"{2 * MAX_RESULT_CHARACTERS} characters are left out" in story

        assert (sample.episode.tool_calls, sample.episode.tool_errors) == (8, 3)
        numbers.add(process)
    assert len(numbers) == 2 and all(map(has_ended, numbers))


def test_a_killed_server_costs_one_call(local):
    turns = [call("buy", fruit="pear"), call("die"), call("buy", fruit="plum"), "done$"]
    (sample,) = local.play([turns])
    bought, died, again = replies(sample)
    assert bought == "pear" and again == "plum"
    assert died.startswith("Error: ConnectionError: the MCP server has ended")
    assert sample.text == "done" and not sample.masked


def test_a_killed_episode_leaves_no_server(local):
    (sample,) = local.play([[call("process", stays=True), call("break_down")]])
    assert sample.masked and sample.episode.problem == "its process has ended with exit code 3"
    assert has_ended(sample.episode.messages[-1]["content"])


def test_a_killed_episode_leaves_no_server_that_the_command_has_started(server, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(ENVIRONMENT)
    made = player(f"sh -c {shlex.quote(f'{server}; true')}", f"{file}:Shop")
    (sample,) = made.play([[call("process", stays=True), call("break_down")]])
    made.episodes.close()
    assert has_ended(sample.episode.messages[-1]["content"])


def test_a_server_that_lives_keeps_what_it_knows(odd):
    """Errors and arguments of one call do not end it, and a call may have any argument."""
    made = player(f"{odd} speak+plot+link+refuse+lose+fall+echo")
    turns = [
        call("echo", function="sin", self=1, name="x"),
        call("speak") + call("plot") + call("link") + call("refuse") + call("lose"),
        '<tool_call>{"name": "echo", "arguments": {"a": "\\ud800"}}</tool_call>'
        '<tool_call>{"name": "echo", "arguments": {"a": NaN}}</tool_call>',
        call("echo"),
        call("fall"),
        call("echo"),
        "done$",
    ]
    (sample,) = made.play([turns])
    made.episodes.close()
    first, failed, plot, link, refused, lost, half, nan, again, fell, anew = replies(sample)
    assert first == '1 {"function": "sin", "self": 1, "name": "x"}'
    assert failed == "Error: RuntimeError: the tool failed without a message"
    assert (
        plot == '(image: the model reads only text)\n{"a": "ä"}' and link == "prices: file:///table"
    )
    assert refused == "Error: MCPError: not today" and lost == "Error: MCPError: no table"
    assert "half of a character" in half and "not JSON compliant" in nan
    assert again == "7 {}"
    assert "has ended" in fell and "the roof is gone" in fell and anew == "1 {}"


def test_a_server_with_an_address_may_end_and_come_back(server):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    running = listening(server, port)
    play = player(f"http://127.0.0.1:{port}/mcp")
    turns = [call("buy", fruit="pear") + call("buy", fruit="stone"), "done$"]
    (sample,) = play.play([turns])
    bought, stone = replies(sample)
    assert bought == "pear" and "no such fruit" in stone

    running.send_signal(signal.SIGKILL)
    running.wait()
    (sample,) = play.play([turns])
    assert all(reply.startswith("Error: ") for reply in replies(sample)), replies(sample)
    assert sample.text == "done"

    running = listening(server, port)
    (sample,) = play.play([[call("buy", fruit="pear"), call("die"), call("process"), "done$"]])
    bought, died, down = replies(sample)
    assert bought == "pear" and died.startswith("Error: ") and down.startswith("Error: ")
    running.wait()
    play.episodes.close()


@pytest.mark.parametrize(
    ("reference", "seconds", "told"),
    [
        ("", 60.0, "its first word is no program"),
        ("no-such-program --port 5", 60.0, "its first word is no program"),
        ("python -c \"raise SystemExit('no database')\"", 60.0, "no database"),
        ("http://127.0.0.1:9/mcp", 60.0, "cannot be used"),
        ("sleep 60", 1.0, r"did not list its tools within 1 s \(--tool_seconds\)"),
    ],
)
def test_servers_that_do_not_answer_are_refused(reference, seconds, told):
    with pytest.raises(ValueError, match=told):
        ProgramSetup("", (f"mcp:{reference}",), tool_seconds=seconds).program()


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("nothing", "cannot be used: MCPError: Connection closed: no key \ufffd"),
        ("add+add", "two of its tools are named add"),
        ("-", "it lists no tools"),
        ("'", "--tools mcp:.*: No closing quotation"),
    ],
)
def test_servers_whose_tools_are_of_no_use_are_refused(odd, listed, told):
    with pytest.raises(ValueError, match=told):
        ProgramSetup("", (f"mcp:{odd} {listed}",), tool_seconds=6.0).program()
