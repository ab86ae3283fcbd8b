"""The tools a dialogue offers: a few kinds, each with the many names, parameters and schemas real clients use.

Skills speak in canonical terms (`Call("read", {"path": ...})`); a `Tool` translates one kind to one surface form.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

JSON_TYPES = ("string", "integer", "boolean", "array")


@dataclass(frozen=True)
class Param:
    key: str
    names: tuple[str, ...]
    about: tuple[str, ...]
    type: str = "string"
    required: bool = True


@dataclass(frozen=True)
class Kind:
    key: str
    names: tuple[str, ...]
    about: tuple[str, ...]
    about_zh: tuple[str, ...]
    params: tuple[Param, ...]
    extras: tuple[Param, ...] = ()


@dataclass(frozen=True)
class Call:
    """One tool call in canonical terms."""

    kind: str
    args: dict[str, str] = field(default_factory=dict)


PATH = Param(
    "path",
    ("path", "filePath", "file_path", "filename", "file", "target"),
    ("Path of the file", "The absolute path to the file", "File path", "要操作的文件路径"),
)
DIR = Param(
    "path",
    ("path", "directory", "dir", "dir_path", "folder"),
    ("Directory to list", "The directory", "Path of the folder", "要列出的目录"),
)
TEXT = Param("text", ("content", "text", "contents", "data"), ("The text to write", "File content", "写入的内容"))

KINDS: dict[str, Kind] = {
    kind.key: kind
    for kind in (
        Kind(
            "read",
            ("read", "Read", "read_file", "readFile", "view", "cat", "open_file", "view_file", "get_file"),
            (
                "Reads a file.",
                "Read the content of a file from the local filesystem.",
                "Show a file.",
                "Returns the text of a file",
            ),
            ("读取文件内容。", "查看一个文件"),
            (PATH,),
            (
                Param("offset", ("offset", "start_line"), ("Line to start from",), "integer", False),
                Param("limit", ("limit", "max_lines"), ("Number of lines",), "integer", False),
            ),
        ),
        Kind(
            "list",
            ("list", "ls", "LS", "list_dir", "list_files", "list_directory", "listFiles", "dir"),
            ("Lists files and directories.", "List the entries of a directory.", "Show what a folder holds"),
            ("列出目录中的文件。", "查看文件夹"),
            (DIR,),
            (Param("ignore", ("ignore", "exclude"), ("Glob patterns to skip",), "array", False),),
        ),
        Kind(
            "grep",
            ("grep", "Grep", "search", "search_files", "rg", "search_code", "find_in_files"),
            ("Searches file contents for a pattern.", "Fast content search with regular expressions.", "Find text in files"),
            ("在文件中搜索文本。", "按模式查找代码"),
            (
                Param("pattern", ("pattern", "query", "regex", "text"), ("What to search for", "The regex pattern", "搜索内容")),
                Param("path", ("path", "dir", "directory", "root"), ("Where to search", "搜索目录"), required=False),
            ),
            (Param("include", ("include", "glob"), ("File pattern to include",), "string", False),),
        ),
        Kind(
            "run",
            ("bash", "Bash", "run", "shell", "exec_command", "run_command", "execute", "terminal", "run_shell"),
            ("Executes a command in a shell.", "Run a shell command and return its output.", "Runs a terminal command"),
            ("运行一条命令。", "在终端执行命令"),
            (
                Param(
                    "command",
                    ("command", "cmd", "script", "commandLine"),
                    ("The command to execute", "Shell command", "要执行的命令"),
                ),
            ),
            (
                Param("timeout", ("timeout", "timeout_ms"), ("Timeout in milliseconds",), "integer", False),
                Param("workdir", ("workdir", "cwd"), ("Working directory",), "string", False),
            ),
        ),
        Kind(
            "write",
            ("write", "Write", "write_file", "writeFile", "create_file", "save_file", "save"),
            ("Writes a file.", "Write text to a file, replacing what it held.", "Create a file"),
            ("写入文件。", "创建或覆盖文件"),
            (PATH, TEXT),
        ),
        Kind(
            "edit",
            ("edit", "Edit", "edit_file", "replace", "str_replace", "replace_in_file"),
            ("Replaces text in a file.", "Performs exact string replacements in files.", "Change part of a file"),
            ("替换文件中的文本。", "修改文件"),
            (
                PATH,
                Param("old", ("oldString", "old_string", "old", "search", "from"), ("Text to replace", "原文本")),
                Param("new", ("newString", "new_string", "new", "replacement", "to"), ("Text to put in its place", "新文本")),
            ),
            (Param("all", ("replaceAll", "replace_all"), ("Replace every match",), "boolean", False),),
        ),
        Kind(
            "calc",
            ("calc", "calculator", "calculate", "eval_math", "math", "compute"),
            ("Evaluates an arithmetic expression.", "A calculator.", "Computes a formula and returns the number"),
            ("计算算术表达式。", "计算器"),
            (Param("expression", ("expression", "expr", "formula", "input"), ("The expression", "算式")),),
        ),
        Kind(
            "lookup",
            ("lookup", "get_record", "find_record", "query_db", "fetch_record", "getRecord"),
            ("Looks up a record.", "Get one record from a table by its id.", "Fetch a database row"),
            ("查询一条记录。", "按编号查表"),
            (
                Param("table", ("table", "collection", "dataset"), ("Table name", "表名")),
                Param("id", ("id", "key", "record_id"), ("Record id", "编号")),
            ),
        ),
        Kind(
            "weather",
            ("get_weather", "weather", "weather_lookup", "getWeather"),
            ("Returns the weather of a city.", "Current weather"),
            ("查询城市天气。", "天气"),
            (Param("city", ("city", "location", "place"), ("City name", "城市")),),
        ),
        Kind(
            "send",
            ("send_message", "send_email", "notify", "sendMessage", "message"),
            ("Sends a message to a person.", "Send a short message"),
            ("给某人发消息。", "发送消息"),
            (
                Param("to", ("to", "recipient", "user"), ("Who receives it", "收件人")),
                Param("text", ("text", "body", "message"), ("The message", "内容")),
            ),
        ),
        Kind(
            "fetch",
            ("webfetch", "WebFetch", "fetch", "fetch_url", "http_get", "open_url"),
            ("Fetches a web page.", "Get the content of a URL"),
            ("抓取网页。", "打开网址"),
            (Param("url", ("url", "uri", "link"), ("The URL", "网址")),),
        ),
    )
}

DISTRACTORS: tuple[Kind, ...] = (
    Kind(
        "todo",
        ("todowrite", "TodoWrite", "update_plan"),
        ("Keeps the task list.",),
        ("维护任务列表。",),
        (Param("todos", ("todos", "plan"), ("The list",), "array"),),
    ),
    Kind(
        "task",
        ("task", "Task", "spawn_agent"),
        ("Starts a helper agent.",),
        ("启动子任务。",),
        (Param("prompt", ("prompt",), ("What to do",)),),
    ),
    Kind(
        "translate",
        ("translate", "translate_text"),
        ("Translates text.",),
        ("翻译文本。",),
        (Param("text", ("text",), ("Text",)), Param("lang", ("target_language", "lang"), ("Language",))),
    ),
    Kind(
        "commit",
        ("git_commit", "commit"),
        ("Records a commit.",),
        ("提交改动。",),
        (Param("message", ("message", "msg"), ("Commit message",)),),
    ),
    Kind(
        "image",
        ("view_image", "screenshot"),
        ("Shows an image.",),
        ("查看图片。",),
        (Param("image", ("image_path", "image"), ("Image file",)),),
    ),
    Kind("delete", ("delete_file", "remove"), ("Deletes a file.",), ("删除文件。",), (PATH,)),
    Kind(
        "move",
        ("move_file", "rename"),
        ("Moves a file.",),
        ("移动文件。",),
        (Param("src", ("source", "src"), ("From",)), Param("dst", ("destination", "dst"), ("To",))),
    ),
)


SHELL = {"read": "cat {path}", "list": "ls {path}", "grep": "grep -rn {pattern} {path}"}  # for clients with a shell only


@dataclass(frozen=True)
class Tool:
    """One kind as one client offers it."""

    kind: str
    name: str
    names: dict[str, str]
    schema: dict
    as_list: bool = False
    explain: str | None = None

    def arguments(self, call: Call) -> dict:
        """The call's arguments in this tool's words, in the order of its schema."""
        args: dict = {}
        if self.kind == "run" and call.kind in SHELL:
            call = Call("run", {"command": SHELL[call.kind].format(**{"path": "."} | call.args)})
        for key, value in call.args.items():
            args[self.names[key]] = ["bash", "-lc", value] if self.as_list else value
        if self.explain is not None:
            args[self.explain] = f"Run {call.args['command']}"
        return args


def make_tool(kind: Kind, rng: random.Random, zh: bool, terse: float = 0.4) -> Tool:
    """Dress a kind: pick names, descriptions and the schema habits of some client."""
    name = rng.choice(kind.names)
    described = rng.random() > terse
    names, properties, required = {}, {}, []
    as_list = kind.key == "run" and rng.random() < 0.08
    for param in kind.params + tuple(p for p in kind.extras if rng.random() < 0.25):
        surface = rng.choice(param.names)
        names[param.key] = surface
        prop: dict = {"type": param.type}
        if param.type == "array":
            prop["items"] = {"type": "string"}
        if as_list and param.key == "command":
            prop = {"type": "array", "items": {"type": "string"}}
        if described:
            prop["description"] = rng.choice(param.about)
        properties[surface] = prop
        if param.required:
            required.append(surface)
    explain = None
    if kind.key == "run" and not as_list and rng.random() < 0.15:
        explain = "description"
        properties[explain] = {"type": "string", "description": "What the command does"}
        required.append(explain)
    parameters = {"type": "object", "properties": properties, "required": required}
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    if rng.random() < 0.08:
        parameters = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters}
    function = {
        "name": name,
        "description": rng.choice(kind.about_zh if zh and rng.random() < 0.6 else kind.about),
        "parameters": parameters,
    }
    if rng.random() < 0.1:
        function["strict"] = False
    return Tool(kind.key, name, names, {"type": "function", "function": function}, as_list, explain)


def make_toolset(needed: set[str], rng: random.Random, zh: bool, extra: int, shell: bool = False) -> dict[str, Tool]:
    """Tools for the needed kinds plus `extra` others, shuffled; no two share a name.

    With `shell`, files are read, listed and searched by the shell alone, as some agents do.
    """
    if shell and needed & set(SHELL):
        kept = (needed - set(SHELL)) | {"run"}
        others = [k for k in KINDS.values() if k.key not in kept and k.key not in SHELL] + list(DISTRACTORS)
        tools = dressed(kept, others, rng, zh, extra)
        return tools | {kind: tools["run"] for kind in sorted(needed & set(SHELL))}
    return dressed(needed, [k for k in KINDS.values() if k.key not in needed] + list(DISTRACTORS), rng, zh, extra)


def dressed(needed: set[str], others: list[Kind], rng: random.Random, zh: bool, extra: int) -> dict[str, Tool]:
    chosen = [KINDS[key] for key in sorted(needed)] + rng.sample(others, min(extra, len(others)))
    rng.shuffle(chosen)
    terse = rng.choice((0.2, 0.9))
    tools: dict[str, Tool] = {}
    taken: set[str] = set()
    for kind in chosen:
        tool = make_tool(kind, rng, zh, terse)
        while tool.name in taken:
            tool = make_tool(kind, rng, zh, terse)
        taken.add(tool.name)
        tools[kind.key] = tool
    return tools
