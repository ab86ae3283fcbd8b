"""Skills of several steps: retry, search then read, list then read, two reads at once, copy, edit then run."""

from __future__ import annotations

from .names import CODE_EXTENSIONS, CONFIG_EXTENSIONS, Names
from .rounds import Round, Step
from .skills_files import done_write, fresh_pairs, grep_call, must, say, settings, shell_task, tells, tick, write_result
from .toolbox import Call


def retry_read(n: Names, zh: bool) -> Round:
    path, other, pairs = n.path(CONFIG_EXTENSIONS), n.path(CONFIG_EXTENSIONS), fresh_pairs(n, 1, 4)
    key, value = n.rng.choice(pairs)
    user = say(
        n,
        zh,
        ("What is {k} in {p}?", "Read {p} and tell me {k}."),
        ("{p} 里的 {k} 是多少？", "读取 {p}，告诉我 {k}。"),
        k=tick(n, key),
        p=tick(n, path),
    )
    steps = (
        Step(
            must(zh, "read the file", "读取文件"),
            (Call("read", {"path": path}),),
            (f"File not found: {path}\nDid you mean {other}?",),
        ),
        Step(must(zh, "read the other file", "读取另一个文件"), (Call("read", {"path": other}),), (settings(n, pairs),)),
    )
    return tells("retry_read", zh, user, steps, (key, value), f"查看 {key}" if zh else f"Check {key}")


def find_then_read(n: Names, zh: bool) -> Round:
    """Search for a key's file, then read it."""
    path, pairs = n.path(CONFIG_EXTENSIONS), fresh_pairs(n, 1, 4)
    key, value = n.rng.choice(pairs)
    user = say(
        n,
        zh,
        (
            "Find the file that sets {k}, read it and tell me the value.",
            "Search for {k}, then open that file: what is its value?",
        ),
        ("找到设置 {k} 的文件，读取它并告诉我值。", "先搜索 {k}，再打开那个文件，它的值是多少？"),
        k=tick(n, key),
    )
    steps = (
        Step(
            must(zh, "search first", "先搜索"),
            (grep_call(key, None),),
            (n.rng.choice((f"{path}:{n.rng.randint(1, 99)}:{key}", path)),),
        ),
        Step(must(zh, "read the file", "读取文件"), (Call("read", {"path": path}),), (settings(n, pairs),)),
    )
    return tells("find_then_read", zh, user, steps, (key, value), f"查找 {key}" if zh else f"Find {key}")


def list_then_read(n: Names, zh: bool) -> Round:
    """List a directory, read the one file with the wanted ending."""
    ending = n.rng.choice(("json", "toml", "yaml", "ini"))
    folder, target, pairs = n.directory(), n.filename([ending]), fresh_pairs(n, 1, 4)
    names = [target] + n.distinct(lambda: n.filename(CODE_EXTENSIONS), n.rng.randint(1, 3))
    n.rng.shuffle(names)
    key, value = n.rng.choice(pairs)
    user = say(
        n,
        zh,
        ("List {d}, read the .{e} file there and tell me {k}.", "What is {k} in the {e} file in {d}?"),
        ("列出 {d}，读取其中的 .{e} 文件，告诉我 {k}。", "{d} 里的 {e} 文件中 {k} 是多少？"),
        d=tick(n, folder),
        e=ending,
        k=tick(n, key),
    )
    path = f"{folder}/{target}"
    steps = (
        Step(must(zh, "list the directory first", "先列出目录"), (Call("list", {"path": folder}),), ("\n".join(names),)),
        Step(must(zh, "read the file", "读取文件"), (Call("read", {"path": path}),), (settings(n, pairs),)),
    )
    return tells("list_then_read", zh, user, steps, (key, value), f"查看 {key}" if zh else f"Check {key}")


def read_two(n: Names, zh: bool) -> Round:
    """Two reads in parallel."""
    paths = n.distinct(lambda: n.path(CONFIG_EXTENSIONS), 2)
    key = n.ident(2)
    values = [n.value(), n.value()]
    user = say(
        n,
        zh,
        ("What is {k} in {a} and in {b}?", "Read {a} and {b} and compare {k}."),
        ("{a} 和 {b} 里的 {k} 分别是多少？", "读取 {a} 和 {b}，比较 {k}。"),
        k=tick(n, key),
        a=tick(n, paths[0]),
        b=tick(n, paths[1]),
    )
    texts = tuple(settings(n, [(key, v)] + fresh_pairs(n, 1, 2)) for v in values)
    step = Step(must(zh, "read both files", "读取两个文件"), tuple(Call("read", {"path": p}) for p in paths), texts)
    told = [f"`{p}` 中是 `{v}`" if zh else f"`{v}` in `{p}`" for p, v in zip(paths, values, strict=True)]
    answer = f"`{key}` 在 {told[0]}，在 {told[1]}。" if zh else f"`{key}` is {told[0]} and {told[1]}."
    return Round(
        "read_two",
        user,
        (step,),
        "两个文件都读到了。" if zh else "Both files are read.",
        answer,
        tuple(values),
        f"比较 {key}" if zh else f"Compare {key}",
    )


def copy_value(n: Names, zh: bool) -> Round:
    """Read a value, write it to another file, run a command on it: up to three steps."""
    source, target, pairs = n.path(CONFIG_EXTENSIONS), n.path(), fresh_pairs(n, 1, 4)
    key, value = n.rng.choice(pairs)
    steps = [
        Step(must(zh, "read the value first", "先读取值"), (Call("read", {"path": source}),), (settings(n, pairs),)),
        Step(
            must(zh, "write the value", "写入这个值"),
            (Call("write", {"path": target, "text": value}),),
            (write_result(n, target),),
        ),
    ]
    user = say(
        n,
        zh,
        ("Read {k} from {a} and write its value to {b}.", "Copy the value of {k} in {a} to {b}."),
        ("从 {a} 读取 {k}，把它的值写入 {b}。", "把 {a} 里 {k} 的值写到 {b}。"),
        k=tick(n, key),
        a=tick(n, source),
        b=tick(n, target),
    )
    return Round(
        "copy_value",
        user,
        tuple(steps),
        "文件写好了。" if zh else "The file is written.",
        done_write(zh, target),
        (target,),
        f"复制 {key}" if zh else f"Copy {key}",
    )


def edit_then_run(n: Names, zh: bool) -> Round:
    """Edit a file, then run a command and report it."""
    path, (old, new) = n.path(CODE_EXTENSIONS), n.distinct(lambda: n.ident(2), 2)
    command, output = shell_task(n)
    told = output.splitlines()[-1]
    user = say(
        n,
        zh,
        ("Replace `{o}` with `{w}` in {p}, then run `{c}`.", "Change `{o}` to `{w}` in {p} and run `{c}`"),
        ("把 {p} 中的 `{o}` 改成 `{w}`，然后运行 `{c}`。", "在 {p} 里将 `{o}` 替换为 `{w}`，再执行 `{c}`"),
        o=old,
        w=new,
        p=tick(n, path),
        c=command,
    )
    steps = (
        Step(
            must(zh, "edit the file", "修改文件"),
            (Call("edit", {"path": path, "old": old, "new": new}),),
            (n.rng.choice(("ok", "Edit applied successfully.")),),
        ),
        Step(must(zh, "run the command", "运行命令"), (Call("run", {"command": command}),), (output,)),
    )
    answer = f"输出是：`{told}`" if zh else f"The output is: `{told}`"
    return Round(
        "edit_then_run",
        user,
        steps,
        "命令运行了。" if zh else "The command ran.",
        answer,
        (told,),
        f"修改 {path}" if zh else f"Edit {path}",
    )


STEP_SKILLS = (
    (retry_read, 2),
    (find_then_read, 3),
    (list_then_read, 3),
    (read_two, 3),
    (copy_value, 3),
    (edit_then_run, 2),
)
