"""Skills of a coding agent: read, list, search, run, write, edit, in one to four steps, with errors and retries."""

from __future__ import annotations

from .names import CODE_EXTENSIONS, CONFIG_EXTENSIONS, Names
from .rounds import Round, Step
from .toolbox import Call


def say(n: Names, zh: bool, english: tuple[str, ...], chinese: tuple[str, ...], **slots: str) -> str:
    """One phrasing of a request with its slots filled."""
    return n.rng.choice(chinese if zh else english).format(**slots)


def tick(n: Names, text: str) -> str:
    """Users quote names in different ways, or not at all."""
    form = n.rng.random()
    return f"`{text}`" if form < 0.4 else f'"{text}"' if form < 0.5 else text


def settings(n: Names, pairs: list[tuple[str, str]]) -> str:
    """Key-value pairs as the text of a configuration file."""
    style = n.rng.choice(("toml", "yaml", "env", "json", "code"))
    if style == "json":
        return "{\n" + ",\n".join(f'  "{k}": "{v}"' for k, v in pairs) + "\n}"
    if style == "code":
        return "\n".join([f"import {n.word()}", ""] + [f'{k} = "{v}"' for k, v in pairs])
    join = {"toml": " = ", "yaml": ": ", "env": "="}[style]
    head = [f"[{n.word()}]"] if style == "toml" and n.rng.random() < 0.5 else []
    head += [f"# {n.word()} {n.word()}"] if n.rng.random() < 0.3 else []
    return "\n".join(head + [f"{k}{join}{v}" for k, v in pairs])


def fresh_pairs(n: Names, least: int = 2, most: int = 6) -> list[tuple[str, str]]:
    keys = n.distinct(lambda: n.ident(2), n.rng.randint(least, most))
    return [(key, n.value()) for key in keys]


def is_value(zh: bool, key: str, value: str) -> str:
    return f"`{key}` 的值是 `{value}`。" if zh else f"`{key}` is `{value}`."


def tells(skill: str, zh: bool, user: str, steps: tuple[Step, ...], pair: tuple[str, str], title: str) -> Round:
    """A round whose answer is one value out of the last result."""
    return Round(skill, user, steps, found(zh), is_value(zh, *pair), (pair[1],), title)


def must(zh: bool, deed_en: str, deed_zh: str) -> str:
    """The one-line thought before a call. It names nothing: a thought that copied a name it could not spell never closed."""
    return f"需要{deed_zh}。" if zh else f"I need to {deed_en}."


def found(zh: bool) -> str:
    """The thought before an answer that stands in the last result."""
    return "结果里有答案。" if zh else "The result has the answer."


def read_value(n: Names, zh: bool) -> Round:
    path, pairs = n.path(CONFIG_EXTENSIONS), fresh_pairs(n)
    key, value = n.rng.choice(pairs)
    user = say(
        n,
        zh,
        (
            "What is {k} in {p}?",
            "Read {p} and tell me the value of {k}.",
            "Which {k} does {p} set?",
            "Check {k} in {p} please.",
            "Please open {p}. What is {k} set to?",
            "Find the value of {k} in the file {p}",
            "I need {k} from {p}.",
        ),
        (
            "{p} 里的 {k} 是多少？",
            "读取 {p}，告诉我 {k} 的值。",
            "请查看 {p} 中的 {k}。",
            "帮我看看文件 {p} 里 {k} 是什么",
            "打开 {p}，{k} 设成了什么？",
        ),
        k=tick(n, key),
        p=tick(n, path),
    )
    step = Step(must(zh, "read the file", "读取文件"), (Call("read", {"path": path}),), (settings(n, pairs),))
    return tells("read_value", zh, user, (step,), (key, value), f"查看 {key}" if zh else f"Check {key}")


def code_text(n: Names, name: str) -> str:
    """A few lines of code that define `name`."""
    other, arg = n.ident(2), n.word()
    return n.rng.choice(
        (
            f"def {name}({arg}):\n    return {arg} + {n.rng.randint(1, 9)}",
            f"import {n.word()}\n\nclass {name}:\n    {other} = {n.rng.randint(0, 99)}",
            f"function {name}({arg}) {{\n  return {other}({arg});\n}}",
            f"{other} = None\n\ndef {name}({arg}, {n.word()}=None):\n    pass",
        )
    )


def summarize_file(n: Names, zh: bool) -> Round:
    path, name = n.path(CODE_EXTENSIONS), n.ident(2)
    user = say(
        n,
        zh,
        (
            "What does {p} define?",
            "Read {p} and tell me what it defines.",
            "Open {p} and explain it briefly.",
            "Show me {p}",
            "Take a look at {p}.",
            "Explain {p}",
        ),
        ("{p} 定义了什么？", "读取 {p}，说说它定义了什么。", "看一下 {p}", "解释一下 {p}", "打开 {p}，简单说明"),
        p=tick(n, path),
    )
    step = Step(must(zh, "read the file", "读取文件"), (Call("read", {"path": path}),), (code_text(n, name),))
    answer = f"`{path}` 定义了 `{name}`。" if zh else f"`{path}` defines `{name}`."
    return Round("summarize_file", user, (step,), found(zh), answer, (name,), f"解释 {path}" if zh else f"Explain {path}")


def entries(n: Names, least: int = 1, most: int = 5) -> list[str]:
    return n.distinct(lambda: n.filename() if n.rng.random() < 0.75 else n.word() + "/", n.rng.randint(least, most))


def list_dir(n: Names, zh: bool) -> Round:
    path, names = n.directory(), entries(n)
    user = say(
        n,
        zh,
        (
            "List the files in {p}.",
            "What is in {p}?",
            "Which files are in the directory {p}?",
            "ls {p}",
            "Show the folder {p}",
            "What files does {p} contain?",
        ),
        ("列出 {p} 里的文件。", "{p} 里有什么？", "目录 {p} 有哪些文件？", "看看文件夹 {p}", "{p} 下面有哪些内容？"),
        p=tick(n, path),
    )
    step = Step(must(zh, "list the directory", "列出目录"), (Call("list", {"path": path}),), ("\n".join(names),))
    told = ", ".join(f"`{name}`" for name in names)
    answer = f"`{path}` 包含：{told}。" if zh else f"`{path}` contains: {told}."
    thought = "结果列出了文件。" if zh else "The result lists the files."
    return Round("list_dir", user, (step,), thought, answer, tuple(names), f"列出 {path}" if zh else f"List {path}")


def grep_call(pattern: str, where: str | None) -> Call:
    return Call("grep", {"pattern": pattern} | ({"path": where} if where else {}))


def find_definition(n: Names, zh: bool) -> Round:
    name, path, line = n.ident(), n.path(CODE_EXTENSIONS), n.rng.randint(1, 400)
    where = n.directory() if n.rng.random() < 0.4 else None
    inside = (f" 在 {tick(n, where)} 中" if zh else f" in {tick(n, where)}") if where else ""
    user = say(
        n,
        zh,
        (
            "Where is {k} defined{i}?",
            "Find the definition of {k}{i}.",
            "Search for {k}{i}.",
            "Which file mentions {k}{i}?",
            "grep for {k}{i}",
            "Locate {k}{i} please.",
        ),
        ("{k}{i} 的定义在哪里？", "搜索 {k}{i}。", "找到 {k}{i} 的定义。", "哪个文件提到了 {k}{i}？", "查找 {k}{i}"),
        k=tick(n, name),
        i=inside,
    )
    if n.rng.random() < 0.12:
        result = n.rng.choice(("No matches found", "No files found", "(no output)"))
        answer = f"没有找到 `{name}`。" if zh else f"`{name}` was not found."
        facts: tuple[str, ...] = (name, "没有找到" if zh else "not found")
    else:
        line_text = n.rng.choice((f"def {name}({n.word()}):", f"class {name}:", f"const {name} = {n.rng.randint(0, 99)};"))
        result = f"{path}:{line}:{line_text}" if n.rng.random() < 0.7 else f"{path}:\n  Line {line}: {line_text}"
        answer = f"`{name}` 在 `{path}` 第 {line} 行。" if zh else f"`{name}` is in `{path}`, line {line}."
        facts = (path, str(line))
    step = Step(must(zh, "search for the name", "搜索这个名称"), (grep_call(name, where),), (result,))
    return Round("find_definition", user, (step,), found(zh), answer, facts, f"查找 {name}" if zh else f"Find {name}")


def shell_task(n: Names) -> tuple[str, str]:
    """A command and its output."""
    rng, word, path = n.rng, n.word(), n.path()
    passed, failed = rng.randint(1, 99), rng.randint(0, 9)
    return rng.choice(
        (
            (f"pytest {path}", f"{passed} passed, {failed} failed"),
            (f"npm run {word}", f"> {word}\nDone in {passed}s"),
            (f"wc -l {path}", f"{passed} {path}"),
            (f"git checkout {n.ident(2)}", f"Switched to branch '{word}'"),
            (f"make {word}", f"make: {word} is up to date."),
            (f"python {path}", n.value()),
            (f"echo {word}", word),
            (f"cargo {word}", f"error: {n.ident()}"),
            ("git status", f"On branch {word}"),
            ("pwd", n.directory()),
            (f"docker ps -q -f name={word}", n.value()),
            ("whoami", word),
            (f"go {word} ./{n.word()}", f"ok {n.word()} {passed}s"),
            ("date", f"{passed} {word}"),
        )
    )


def run_command(n: Names, zh: bool) -> Round:
    command, output = shell_task(n)
    told = output.splitlines()[-1]
    user = say(
        n,
        zh,
        ("Run {c}", "Please run {c} and tell me the result.", "Execute {c}.", "What does {c} print?", "Run the command {c}"),
        ("运行 {c}", "执行 {c}，告诉我结果。", "请运行命令 {c}", "{c} 输出什么？"),
        c=f"`{command}`" if n.rng.random() < 0.8 else command,
    )
    step = Step(must(zh, "run the command", "运行命令"), (Call("run", {"command": command}),), (output,))
    answer = f"输出是：`{told}`" if zh else f"The output is: `{told}`"
    thought = "命令运行了。" if zh else "The command ran."
    return Round("run_command", user, (step,), thought, answer, (told,), f"运行 {command}" if zh else f"Run {command}")


def words(n: Names, count: int) -> str:
    """Words that may repeat: after the same word another one follows, which copying by the last word alone gets wrong."""
    made = [n.word()]
    while len(made) < count:
        made.append(n.rng.choice(made) if n.rng.random() < 0.15 else n.word())
    return " ".join(made)


def short_text(n: Names) -> str:
    return n.rng.choice((f"{n.ident(2)} = {n.value()}", words(n, 3), n.value(), f"# {n.word()}", f"print({n.word()})"))


def done_write(zh: bool, path: str) -> str:
    return f"已写入 `{path}`。" if zh else f"Wrote `{path}`."


def write_result(n: Names, path: str) -> str:
    return n.rng.choice(("ok", f"Wrote {n.rng.randint(1, 99)} bytes to {path}", "File written successfully", "Done", "成功"))


def write_text(n: Names, zh: bool) -> Round:
    path, text = n.path(), short_text(n)
    user = say(
        n,
        zh,
        (
            "Write `{t}` to {p}.",
            "Create {p} with the content `{t}`",
            "Save `{t}` into the file {p}.",
            "Make a file {p} that says `{t}`",
        ),
        ("把 `{t}` 写入 {p}。", "创建 {p}，内容是 `{t}`", "在文件 {p} 中写 `{t}`", "新建 {p}，写上 `{t}`。"),
        t=text,
        p=tick(n, path),
    )
    step = Step(must(zh, "write the file", "写入文件"), (Call("write", {"path": path, "text": text}),), (write_result(n, path),))
    thought = "文件写好了。" if zh else "The file is written."
    return Round("write_text", user, (step,), thought, done_write(zh, path), (path,), f"写入 {path}" if zh else f"Write {path}")


def edit_text(n: Names, zh: bool) -> Round:
    path, old, new = n.path(), *n.distinct(lambda: n.ident(2), 2)
    user = say(
        n,
        zh,
        (
            "Replace `{o}` with `{w}` in {p}.",
            "In {p}, change `{o}` to `{w}`.",
            "Rename `{o}` to `{w}` in {p}",
            "Edit {p}: `{o}` should become `{w}`",
        ),
        ("把 {p} 中的 `{o}` 改成 `{w}`。", "在 {p} 里将 `{o}` 替换为 `{w}`", "修改 {p}：`{o}` 改为 `{w}`"),
        o=old,
        w=new,
        p=tick(n, path),
    )
    step = Step(
        must(zh, "edit the file", "修改文件"),
        (Call("edit", {"path": path, "old": old, "new": new}),),
        (n.rng.choice(("ok", "Edit applied successfully.", f"The file {path} has been updated.", "1 replacement", "修改成功")),),
    )
    thought = "修改完成了。" if zh else "The edit is done."
    answer = f"已在 `{path}` 中将 `{old}` 改为 `{new}`。" if zh else f"Changed `{old}` to `{new}` in `{path}`."
    return Round("edit_text", user, (step,), thought, answer, (path, new), f"修改 {path}" if zh else f"Edit {path}")


def missing_file(n: Names, zh: bool) -> Round:
    path, key = n.path(CONFIG_EXTENSIONS), n.ident(2)
    user = say(
        n,
        zh,
        ("What is {k} in {p}?", "Read {p} and tell me {k}.", "Open {p} and check {k}."),
        ("{p} 里的 {k} 是多少？", "读取 {p}，告诉我 {k}。", "请查看 {p} 中的 {k}。"),
        k=tick(n, key),
        p=tick(n, path),
    )
    error = n.rng.choice(
        ("Error: file not found: {}", "ENOENT: no such file or directory, open '{}'", "File not found: {}", "错误：文件不存在 {}")
    )
    step = Step(must(zh, "read the file", "读取文件"), (Call("read", {"path": path}),), (error.format(path),))
    answer = f"文件 `{path}` 不存在。" if zh else f"The file `{path}` does not exist."
    return Round(
        "missing_file",
        user,
        (step,),
        "文件不存在。" if zh else "The file does not exist.",
        answer,
        (path, "不存在" if zh else "does not exist"),
        f"查看 {key}" if zh else f"Check {key}",
    )


FILE_SKILLS = (
    (read_value, 10),
    (summarize_file, 4),
    (list_dir, 5),
    (find_definition, 6),
    (run_command, 7),
    (write_text, 6),
    (edit_text, 4),
    (missing_file, 3),
)
